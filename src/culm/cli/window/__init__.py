"""Commands that open another window of a running job of this machine.

attach_command  show the job as `culm run` does
logs_command    print what the job has shown so far
stop_command    end the job with a checkpoint
"""

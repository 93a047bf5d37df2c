"""A program that is one invocation of the Lambda function: the handler, with the event that is its argument."""

import json
import sys

from culm.gnn.launch.handler import handler


class Minute:
    """The context of an invocation that has a minute left."""

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


if __name__ == "__main__":
    handler(json.loads(sys.argv[1]), Minute())

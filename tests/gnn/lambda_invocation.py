"""Program that runs one Lambda invocation: the handler, with the event in its argument."""

import json
import sys

from culm.gnn.launch.lambda_handler import handler


class OneMinuteContext:
    """Context of an invocation with one minute left."""

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


if __name__ == "__main__":
    handler(json.loads(sys.argv[1]), OneMinuteContext())

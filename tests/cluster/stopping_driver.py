"""A driver that takes steps and stops when it is asked to, without Ray: `stopping_driver.py GRACE STEP CLEANING`.

GRACE: seconds, or "none". STEP, CLEANING: seconds that a step and the cleaning up take.
"""

import sys
import time

from megatron_rl.cluster.signals import StopRequest, graceful_signals
from megatron_rl.errors import MegatronRLError, StoppedAfterStep


def run(stop: StopRequest, step_s: float, cleaning_s: float) -> None:
    try:
        while True:
            print("step\n", end="", flush=True)
            time.sleep(step_s)
            if stop.is_set:
                stop.fulfil(StoppedAfterStep.exit_code)
                print(stop.signal.name, round(stop.remaining_s()), flush=True)
                raise StoppedAfterStep("saved")
    finally:
        print("cleaning up", flush=True)
        time.sleep(cleaning_s)
        print("cleaned up", flush=True)


if __name__ == "__main__":
    grace, step_s, cleaning_s = sys.argv[1:]
    try:
        with graceful_signals(None if grace == "none" else float(grace)) as stop:
            run(stop, float(step_s), float(cleaning_s))
    except KeyboardInterrupt:
        sys.exit(130)
    except MegatronRLError as error:
        print(error)
        sys.exit(error.exit_code)

"""What ends a driver that a signal asked to end and that hangs in some library: a thread that needs no other."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import suppress

CLEANUP_S = 45.0
"""To shut Ray and the ranks down takes seconds; a rank that ignores its end is killed after 10."""

_LOOK_S = 0.5
_STDERR = 2


class LastResort:
    """Once armed it ends this process at a deadline, whatever its main thread does, until it is stood down.

    The companion process (`reaper`) then kills what the driver has left. Both methods may be called in the handler of
    a signal: they only set attributes.
    """

    def __init__(self) -> None:
        self._deadline, self._exit_code = math.inf, 0
        self._is_over = False
        threading.Thread(target=self._run, name="last resort", daemon=True).start()

    def arm(self, seconds: float, exit_code: int) -> None:
        """End the process with this code in so many seconds; the latest call counts."""
        self._deadline, self._exit_code = time.monotonic() + seconds, exit_code

    def stand_down(self) -> None:
        """Never end the process."""
        self._is_over = True

    def _run(self) -> None:
        # The system would give this thread a signal that comes while the main thread takes another, and wake no other.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._is_over:
            time.sleep(_LOOK_S)
            if not self._is_over and time.monotonic() > self._deadline:
                with suppress(OSError):
                    os.write(_STDERR, f"\ncleaning up did not end within {CLEANUP_S:g} s; the run ends now\n".encode())
                os._exit(self._exit_code)

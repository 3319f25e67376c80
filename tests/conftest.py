"""What all tests rely on."""

from __future__ import annotations

import signal

# A shell starts background jobs with Ctrl-C ignored, which every process below would inherit; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""SIGINT as a terminal's programs have it, whoever started the suite. Imported for its effect.

A shell without job control starts background jobs with SIGINT ignored, and children inherit that: the tests of Ctrl-C
would wait for ever.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""The console script `elasticdl`, also `python -m elasticdl_client`: imports the client, then runs it.

Ctrl-C during the import ends the process as it ends a program in C, without a traceback.
"""

import signal


def main() -> None:
    """Run the command line."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # else it is ignored, as in the background of a shell script
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from elasticdl_client import main as client

    signal.signal(signal.SIGINT, handler)
    client.main()


if __name__ == "__main__":
    main()

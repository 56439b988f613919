"""How a service is told to go: SIGTERM or SIGINT, and the exit code by which it says so.

| exit code | meaning                                                                          |
|-----------|----------------------------------------------------------------------------------|
| 0         | the run is finished: there is nothing left to start again                        |
| 143, 130  | told to go by SIGTERM or SIGINT before that: started again, it goes on           |
| 2         | something that a person has to mend, named in one line: trying again is in vain  |
| 1         | a crash: started again, it goes on from the newest checkpoint                    |

A service that ended with 0 after SIGTERM would count as complete for a Kubernetes Job, and would not come back
after a restart of Docker under `restart: on-failure`.
"""

import signal
import threading


class StopRequest(threading.Event):
    """Set once this process is told to go."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Number of the first signal; 0 while there was none."""

    @property
    def exit_code(self) -> int:
        """Returns 128 plus the signal's number, as shells and orchestrators know it; 0 without a signal."""
        return 128 + self.number if self.number else 0

    def receive(self, number: int) -> None:
        """Takes note of signal `number`."""
        self.number = self.number or number
        self.set()

    def listen(self) -> None:
        """Takes both signals from now on. To be called on the main thread."""
        for number in self.SIGNALS:
            signal.signal(number, lambda received, frame: self.receive(received))

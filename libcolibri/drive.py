"""What is known about one drive while it is read from: its speed, its work, its faults.

In: reads that begin, end or fail, with the time of each. Out: estimates and counters. No threads and no locks: its owner has them.
"""

import errno

FAULTS_TO_GIVE_UP = 3  # reads that fail one after the other; a single one may be a hiccup
BEST_BYTES = 128 << 20  # much more than is under way at a time, of which some is finished when the clock starts
_MEMORY_BYTES = 64 << 20  # the estimate forgets half of what it knows with so many bytes


class Drive:
    """One drive of a reader.

    name      the folder that is read, for remarks
    threads   reads at a time
    speed     bytes/s that it gives when it is asked for as much as possible; 0: not known yet. Follows what is seen.

    n_bytes   read so far
    busy_s    seconds in which at least one read was under way
    fault     why it is not read any more; None while it is
    """

    def __init__(self, name: str, threads: int, speed: float = 0.0):
        self.name, self.threads, self.speed = name, threads, speed
        self.n_bytes, self.busy_s = 0, 0.0
        self.fault: OSError | None = None
        self.in_flight = self.bytes_in_flight = 0
        self._faults = 0
        self._marked_s = 0.0  # until when busy_s was counted
        self._seen_bytes = self._seen_s = 0.0
        self._best = self._window_bytes = self._window_s = 0.0

    def begin(self, n_bytes: int, now_s: float) -> None:
        """A read begins."""
        if not self.in_flight:
            self._marked_s = now_s
        self.in_flight += 1
        self.bytes_in_flight += n_bytes

    def end(self, n_bytes: int, now_s: float, error: OSError | None = None) -> None:
        """A read of n_bytes has ended, well or not."""
        self.in_flight -= 1
        self.bytes_in_flight -= n_bytes
        seconds, self._marked_s = now_s - self._marked_s, now_s
        self.busy_s += seconds
        self._window_s += seconds
        if error is not None:
            self._faults += 1
            return
        self._faults = 0
        self.n_bytes += n_bytes
        self._window_bytes += n_bytes
        if self._window_bytes >= BEST_BYTES:
            self._best = max(self._best, self._window_bytes / self._window_s if self._window_s > 0.0 else 0.0)
            self._window_bytes = self._window_s = 0.0
        keep = 0.5 ** (n_bytes / _MEMORY_BYTES)
        self._seen_bytes, self._seen_s = keep * self._seen_bytes + n_bytes, keep * self._seen_s + seconds
        if self._seen_s > 0.0:
            self.speed = self._seen_bytes / self._seen_s

    def answers(self) -> None:
        """It was taken to hang, and was only slow."""
        self._faults = 0
        if self.fault is not None and self.fault.errno == errno.ETIMEDOUT:
            self.fault = None

    @property
    def best(self) -> float:
        """The most bytes/s that it gave while it was read, over any BEST_BYTES of those that came one after the other, or over all while
        they are fewer; 0 before the first."""
        return self._best or (self.n_bytes / self.busy_s if self.busy_s > 0.0 else 0.0)

    @property
    def is_failing(self) -> bool:
        """Whether its last reads all failed, so many that another drive should do its work."""
        return self._faults >= FAULTS_TO_GIVE_UP

    def seconds_for(self, n_bytes: int) -> float:
        """When n_bytes more would be there, after what is under way; 0 while nothing is known of the drive."""
        return (self.bytes_in_flight + n_bytes) / self.speed if self.speed > 0.0 else 0.0

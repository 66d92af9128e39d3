"""One thread that works a step ahead of the loop."""

import queue
import threading
import time
from collections.abc import Callable


class Prefetcher[Item]:
    """Calls `make` in a thread, at most `ahead` items before they are taken.

    An exception of `make` ends the thread and is raised by the `take` whose item it was to be.
    """

    def __init__(self, make: Callable[[], Item], ahead: int = 1) -> None:
        self._make = make
        self._stopping = threading.Event()
        self._room = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue[tuple[Item | None, BaseException | None]] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            self._room.acquire()
            if self._stopping.is_set():
                return
            try:
                item = self._make()
            except BaseException as error:
                self._ready.put((None, error))
                return
            self._ready.put((item, None))

    def take(self) -> tuple[Item, float]:
        """The next item and the seconds spent waiting for it; room for one more is given."""
        started = time.perf_counter()
        item, error = self._ready.get()
        if error is not None:
            raise error
        self._room.release()
        assert item is not None
        return item, time.perf_counter() - started

    def close(self) -> None:
        """Stop after the item in the making, if any; items not taken are dropped."""
        self._stopping.set()
        self._room.release()
        self._thread.join()

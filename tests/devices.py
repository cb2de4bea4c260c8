"""Device memory as a text file that the test rewrites (--device-memory script:PATH), so that no GPU is needed.

Owns: the file.  Called by: tests/faults.  Fails how: AssertionError.
"""
import os

from octavo import eventually

MB = 1 << 20
TOTAL = 80000 * MB
HELD = 9000 * MB


class Devices:
    """The script: what each device says now."""

    def __init__(self, folder):
        self.path = folder / "devices"
        self.say("used 0 of %d" % TOTAL)

    def say(self, *states):
        new = self.path.with_suffix(".new")
        new.write_text("".join([f"devices {len(states)}\n"] + [f"device {i} {s}\n" for i, s in enumerate(states)]))
        os.replace(new, self.path)

    def hold(self, holders, used=None):
        """One device on which each of {pid: bytes} holds memory; used: all that is in use, if it is not their sum."""
        listed = "".join(f" pid {pid} {n}" for pid, n in holders.items())
        self.say(f"used {sum(holders.values()) if used is None else used} of {TOTAL}{listed}")

    def option(self):
        return "--device-memory", f"script:{self.path}"


def serving(launch, devices, *options, tp=2):
    """A server whose ranks hold memory on device 0, and have been seen to."""
    server = launch(*devices.option(), "--log-level", "debug", *options, tp=tp).wait_ready()
    pids = [w["pid"] for w in server.workers()]
    devices.hold({pid: HELD for pid in pids})
    for pid in pids:
        eventually(lambda: f"pid={pid} device=0 bytes={HELD} listed=1" in server.log(), 30, f"what {pid} holds was seen", server)
    return server, pids

"""Turn into a server: the last step before `exec`, run as a program of its own by `engine.keeper.process`.

It enters the identity that the server shall have, asks the kernel for a signal at the parent's death, and becomes the
server. A program is used, not `preexec_fn`, because Python code between fork and exec can deadlock in a process with
threads. It must never import anything of Podium: it runs with `python -I -S` so that it starts within milliseconds.

    launch.py PARENT_PID DEATH_SIGNAL IDENTITY FOLDER PROGRAM [ARGUMENT...]

IDENTITY is `self`, `namespace` (a user namespace in which we are `nobody`, while files keep our own uid outside) or
`UID:GID`. A failure here ends with 125 and one line on standard error.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

EXIT_CODE = 125
CLONE_NEWUSER = 0x10000000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NOBODY = 65534


def enter_namespace() -> None:
    """Enter a new user namespace as `nobody`. The exec that follows drops the capabilities that come with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid = os.geteuid()
    if libc.unshare(CLONE_NEWUSER) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"no user namespace: {os.strerror(errno)}")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1", encoding="ascii")


def become_account(uid: int, gid: int) -> None:
    """Give up root for good: groups first, because afterwards we may not change them any more."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def die_with_parent(parent_pid: int, death_signal: int) -> None:
    """Ask for `death_signal` when the parent dies (Linux only). After the identity: changing it clears the wish."""
    if death_signal and sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            errno = ctypes.get_errno()
            raise OSError(errno, f"no death signal: {os.strerror(errno)}")
    if os.getppid() != parent_pid:
        # The parent died before the wish was made; nobody would ever send the signal.
        raise OSError(0, "the parent is gone")


def main(arguments: list[str]) -> None:
    """Become the server that the arguments name; return only by an exception."""
    parent_pid, death_signal, identity, folder, program, *rest = arguments
    os.umask(0o077)
    # Python starts with SIGPIPE ignored, and exec would hand that on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if identity == "namespace":
        enter_namespace()
    elif identity != "self":
        uid, gid = identity.split(":")
        become_account(int(uid), int(gid))
    os.chdir(folder)
    die_with_parent(int(parent_pid), int(death_signal))
    os.execv(program, [program, *rest])  # noqa: S606 - becoming another program is what this file is for


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, ValueError) as error:
        sys.stderr.write(f"podium: cannot start {' '.join(sys.argv[5:6])}: {error}\n")
        os._exit(EXIT_CODE)

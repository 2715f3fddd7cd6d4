"""Loaded into the server that is fuzzed, by its path: tells what the collector of cycles finds there.

The server says that requests make no cycles, so that what clients send is freed when it is answered. Python keeps what
it collects; asked by a file, in the folder that the environment names, the kinds of it are written to another one.
"""

import contextlib
import gc
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType


def _kind(each: object) -> str:
    """Return the type of an object; of a traceback, the place as well."""
    kind = f"{type(each).__module__}.{type(each).__qualname__}"
    if isinstance(each, TracebackType):
        code = each.tb_frame.f_code
        kind += f" of {os.path.basename(code.co_filename)} {code.co_qualname}"
    return kind


def _tell(folder: Path) -> None:
    asked, told = folder / "asked", folder / "told"
    while True:
        time.sleep(0.05)
        if "nerite.server_process" not in sys.modules or not asked.exists():
            continue
        first = not gc.get_debug()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = Counter({} if first else map(_kind, gc.garbage))
        gc.garbage.clear()
        with contextlib.suppress(OSError):  # the run is over
            asked.unlink()
            (folder / "new").write_text(json.dumps(kinds))
            (folder / "new").rename(told)


if "FUZZ_COLLECTOR" in os.environ:
    threading.Thread(target=_tell, args=(Path(os.environ["FUZZ_COLLECTOR"]),), daemon=True).start()

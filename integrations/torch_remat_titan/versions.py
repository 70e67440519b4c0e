"""Which torchtitan is installed, without importing it."""

import functools
from importlib.metadata import PackageNotFoundError, version

SUPPORTED = ("0.2", "0.3")
"""Series of torchtitan that the integration works with. Tested: 0.2.2 and 0.3.0."""


class UnsupportedHostError(RuntimeError):
    """There is no torchtitan, or one that the integration does not know."""


@functools.cache
def host_series() -> str:
    """The first two parts of the version of the installed torchtitan.

    Raises:
        UnsupportedHostError: it is not one of `SUPPORTED`.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        found = "none"
    series = ".".join(found.split(".")[:2])
    if series not in SUPPORTED:
        raise UnsupportedHostError(
            f"torch_remat_titan works with torchtitan {' and '.join(f'{one}.x' for one in SUPPORTED)}, installed is "
            f"{found}.\n"
            f"To fix: pip install 'torchtitan==0.3.0' (torch 2.14 and later) or 'torchtitan==0.2.2' (torch 2.13)."
        )
    return series

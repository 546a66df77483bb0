"""The endpoint picker's process: `python -m sgl_ext.epp --worker http://IP:PORT ...`.

It is a balancer with one more way in: on `--picker-port` a gateway asks where its requests go. Its
other port serves as that of every balancer, so both ways share one router.
"""

import sys

from sgl_ext.balancer.serve import Front, serve
from sgl_ext.balancer.server import Balancer
from sgl_ext.process import end_with_parent, hold_hangups
from sgl_ext.settings.schema import PickerSettings
from sgl_ext.settings.sources import picker_settings

_EXTRA = ("google", "grpc", "grpc_health")


def main(argv: list[str]) -> None:
    """As the balancer's `main`."""
    serve(argv, picker_settings, _picker)


def _picker(balancer: Balancer, settings: PickerSettings) -> Front:
    # gRPC must not be imported before the balancer's processes are forked.
    try:
        from sgl_ext.integrations.gateway.stream import EndpointPicker
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in _EXTRA:
            raise
        install = "pip install 'sgl-ext[epp]'"
        raise SystemExit(f"sgl-ext: {missing.name} is not installed: {install}") from None
    return EndpointPicker(balancer, settings)


if __name__ == "__main__":
    end_with_parent()
    # A terminal that closes ends nothing, and at most reads a file again.
    hold_hangups()
    main(sys.argv[1:])

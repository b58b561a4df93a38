"""Between `flipmesh.policy.v1` and plain values. The policy's own types stay in its room: siblings meet on the wire."""

from flipmesh.policy.v1 import policy_service_pb2 as pb

from services.mesh.codec.common import CodecError

MODE_NAMES = {
    "auto": pb.POLICY_MODE_AUTO,
    "manual": pb.POLICY_MODE_MANUAL,
    "pp": pb.POLICY_MODE_PINNED_PP,
    "tp": pb.POLICY_MODE_PINNED_TP,
}
"""The words of the settings and of the command line."""

_NAMES_OF = {number: name for name, number in MODE_NAMES.items()}


def mode_to_proto(name: str) -> "pb.PolicyMode.ValueType":
    """The proto's number of a mode named `auto`, `manual`, `pp` or `tp`.

    Raises:
        CodecError: another word.
    """
    try:
        return MODE_NAMES[name]
    except KeyError:
        raise CodecError(f"mode: {name!r} is none of {', '.join(MODE_NAMES)}") from None


def mode_from_proto(number: "pb.PolicyMode.ValueType") -> str:
    """The word for a mode.

    Raises:
        CodecError: unspecified or unknown.
    """
    try:
        return _NAMES_OF[number]
    except KeyError:
        raise CodecError(f"mode: number {number} is unknown") from None

"""What identifies an adapter, in a request and among stored states. Pure."""

import re
from dataclasses import dataclass

MAX_NAME_CHARACTERS = 128
NO_ADAPTER = 0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


@dataclass(frozen=True)
class Adapter:
    """One adapter of a loaded model."""

    name: str
    """As clients request it."""
    index: int
    digest: str
    """32 hexadecimal digits, which differ if results differ."""


def parse_adapter(text: str) -> tuple[str, str]:
    """Name and folder of `NAME=FOLDER`; raises ValueError."""
    name, equals, folder = (part.strip() for part in text.partition("="))
    if not (name and equals and folder):
        raise ValueError(f"{text!r} is no adapter; write it like poet=adapters/poet")
    if len(name) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise ValueError(f"{name[:MAX_NAME_CHARACTERS]!r} is no name: letters, digits and any of . _ : / - are")
    return name, folder


def state_namespace(namespace: str, adapter: Adapter | None) -> str:
    """The name under which state of a client's namespace and an adapter is stored.

    A client's namespace begins with a digest or a slash, so none looks like an adapter's name.
    """
    return namespace if adapter is None else f"lora:{adapter.digest}:{namespace}"


def client_namespace(state_name: str) -> tuple[str, str | None]:
    """The client's namespace and the adapter's digest from a `state_namespace`."""
    kind, _, rest = state_name.partition(":")
    if kind != "lora":
        return state_name, None
    digest, _, namespace = rest.partition(":")
    return namespace, digest

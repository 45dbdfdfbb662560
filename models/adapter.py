"""What an adapter is known by, in a request and among stored states. Pure."""

import re
from dataclasses import dataclass

MAX_NAME_CHARACTERS = 128
NO_ADAPTER = 0
"""The index of rows that the model evaluates as it is."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*")


@dataclass(frozen=True)
class Adapter:
    """One adapter of a loaded model."""

    name: str
    """The model that clients ask for to get it."""
    index: int
    """Its number among the adapters of its model, from 1."""
    digest: str
    """Differs for adapters that compute something else, and for nothing else; 32 hexadecimal digits."""


@dataclass(frozen=True)
class AdapterPlace:
    """Where an adapter lies, as the command line says it."""

    name: str
    folder: str


def parse_adapter(text: str) -> AdapterPlace:
    """Returns what `NAME=FOLDER` says; raises ValueError."""
    name, equals, folder = (part.strip() for part in text.partition("="))
    if not (name and equals and folder):
        raise ValueError(f"{text!r} is no adapter; write it like poet=adapters/poet")
    if len(name) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise ValueError(f"{name[:MAX_NAME_CHARACTERS]!r} is no name: letters, digits and any of . _ : / - are")
    return AdapterPlace(name, folder)


def state_namespace(namespace: str, adapter: Adapter | None) -> str:
    """Returns the name under which the states of a client's namespace are kept.

    Those of different adapters never meet, nor do those of an adapter whose files have changed since. A client's own
    namespace begins with a digest or a slash, so none looks like an adapter's.
    """
    return namespace if adapter is None else f"lora:{adapter.digest}:{namespace}"


def client_namespace(state_name: str) -> tuple[str, str | None]:
    """Returns the client's namespace that a name of states belongs to, and the digest of its adapter, if any."""
    kind, _, rest = state_name.partition(":")
    if kind != "lora":
        return state_name, None
    digest, _, namespace = rest.partition(":")
    return namespace, digest

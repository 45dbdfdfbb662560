"""The choice of a chat in this process whose model is a fake."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from server.app.config import ServerConfig
from server.cli.repl.local import LocalModels
from server.pool.served import ServedModel


def local_models(model: ServedModel, engine: Any) -> LocalModels:
    """A choice that has loaded `model`."""
    opened = SimpleNamespace(asked_for=model, engine=engine, start=lambda: None)
    with patch("server.cli.repl.local.open_service", lambda config: opened):
        return LocalModels(ServerConfig(models=(model.id,)))

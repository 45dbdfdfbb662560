"""Applications that serve one model."""

from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette

from server.api.app import APIS, create_pool_app
from server.api.dialect import Dialect
from server.app.config import ServerConfig
from server.app.keys import KeyRing
from server.engine.engine import Engine
from server.pool.members import Member
from server.pool.names import ModelSource
from server.pool.pool import ModelPool
from server.pool.served import ServedModel


def member(model: ServedModel, engine: Engine, weights_bytes: int = 0) -> Member:
    """A loaded model whose folder has its id."""
    return Member(ModelSource(model.id, Path(model.id)), model, engine, weights_bytes)


def create_app(
    engine: Engine,
    model: ServedModel,
    config: ServerConfig,
    apis: Sequence[Dialect] = APIS,
    keys: KeyRing | None = None,
) -> Starlette:
    """The application that serves one model by `engine`."""
    return create_pool_app(ModelPool.of(member(model, engine)), config, apis, keys)

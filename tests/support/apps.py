"""Applications that serve one model."""

from collections.abc import Sequence

from starlette.applications import Starlette

from server.api.app import APIS, create_pool_app
from server.api.dialect import Dialect
from server.app.config import ServerConfig
from server.app.keys import KeyRing
from server.engine.engine import Engine
from server.pool.members import OpenedModel
from server.pool.pool import ModelPool
from server.pool.served import ServedModel


def create_app(
    engine: Engine,
    model: ServedModel,
    config: ServerConfig,
    apis: Sequence[Dialect] = APIS,
    keys: KeyRing | None = None,
) -> Starlette:
    """The application that serves one model by `engine`."""
    return create_pool_app(ModelPool.of(OpenedModel(model, engine)), config, apis, keys)

"""Fills caches when it is imported: half of the time that a role takes to load its config."""

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import config

for schema in (ExperimentConfig, ServerConfig):
    config.load(schema, [], [], {})

"""Environments as Requests: `make`, `make_vec`, and wrappers."""

from arealite.impl.env.requests.play import Requests as Requests
from arealite.impl.env.requests.play import make as make
from arealite.impl.env.requests.play import make_vec as make_vec
from arealite.impl.env.requests.wrappers import Record as Record
from arealite.impl.env.requests.wrappers import ScaleReward as ScaleReward
from arealite.impl.env.requests.wrappers import TimeLimit as TimeLimit
from arealite.impl.env.requests.wrappers import TransformObservation as TransformObservation
from arealite.impl.env.requests.wrappers import Wrapper as Wrapper
from arealite.impl.env.requests.wrappers import wrap as wrap

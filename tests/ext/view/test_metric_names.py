"""The catalogue of metrics has exactly the metrics that the code writes."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import arealite
from arealite.algo.losses import make_policy_loss, make_value_loss
from arealite.api.algorithm import CriticConfig, KLConfig, LossConfig
from arealite.api.engine import LossInput
from arealite.api.publisher import PublishReport
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.teacher_scores import TOP_LOGPROBS
from arealite.ext.distillation.token_divergence import with_divergence
from arealite.ext.offline.supervised import DPOTrainer, SFTTrainer
from arealite.ext.step_metrics.token_metrics import token_metrics
from arealite.ext.step_metrics.trajectory_metrics import trajectory_metrics
from arealite.ext.step_metrics.update_metrics import update_metrics
from arealite.ext.view import metric_names
from arealite.ext.view.metric_names import catalogue, describe
from arealite.impl.client.servers_client import COUNTERS
from arealite.impl.rollout import collector
from arealite.impl.trainer import metrics
from arealite.system.datapipe.trainer_request_handler import IdleClock, TrainerRequestHandler
from tests.impl.trainer.trajectories import header, segment

PACKAGE = Path(arealite.__file__).parent
GROUPS = {pattern.split("/")[0] for pattern in catalogue()}


def literals() -> Iterator[str]:
    """Yield metric names `group/name` in the source; placeholders of f-strings become `x`.

    Prefixes and f-strings of readers are skipped, because they are not names.
    """
    found = re.compile(rf'"((?:{"|".join(GROUPS)})/[^"\s]+)"')
    for file in (*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")):
        is_reader = file.parent.name == "view" or file.name in ("snapshot.py", "progress.py")
        for name in found.findall(file.read_text("utf-8")):
            is_elsewhere = re.fullmatch(r"\w+/\{\w+\}", name)  # named by a function below
            if not is_elsewhere and name[-1] not in "/_" and not (is_reader and "{" in name):
                yield re.sub(r"\{.*?\}", "x", name)


def of_trajectories() -> Iterator[str]:
    tokens = [segment([5, 6, 7], sampled=2)]
    waits = dict.fromkeys(waited(), 1.0)
    facts = {"source": "digits", "waits": waits, "reward": 1.0}
    seats = [header(f"g/0/{seat}", tokens, **facts) for seat in ("cop", "thief")]
    yield from trajectory_metrics(seats, step=1)
    always = defaultdict[str, float](lambda: 1.0)
    yield from token_metrics(always, always)
    yield from metrics.publish_metrics(PublishReport(version=1))
    yield from metrics.Stopwatch().lap()


TEACHER = DistillationConfig(teacher="/teacher", top_k=3)


def of_updates() -> Iterator[str]:
    fields = "prox_logprobs behav_logprobs ref_logprobs advantages loss_weight keep values returns"
    zeros = torch.zeros(2)
    top = torch.full((2, 3), -2.0)
    batch = LossInput(
        outputs=dict.fromkeys(("logprobs", "entropy", "values"), zeros) | {"top_logprobs": top},
        rows_N=torch.zeros(2, dtype=torch.int64),
        # Without weights, or with equal returns, nothing is measured.
        fields=dict.fromkeys(fields.split(), zeros)
        | {"loss_weight": torch.ones(2), "returns": torch.arange(2.0)}
        | {"behav_top_logprobs": top, TOP_LOGPROBS: top},
    )
    in_loss, engine = KLConfig(coef=1.0, place="loss"), dict.fromkeys(metrics.ENGINE, 1.0)
    critic = make_value_loss(CriticConfig(value_clip=0.2))(batch)[1] | engine
    for how in ("truncate", "mask"):
        config = LossConfig(behav_weight=how, behav_weight_cap=2.0, centering=True)
        loss = with_divergence(TEACHER, make_policy_loss(config, in_loss))
        stats = loss(batch)[1] | engine
        for name, value in critic.items():
            if not name.startswith("routing_"):  # a critic replays no routing
                stats[f"critic/{name}"] = value
        yield from update_metrics([{name: float(v) for name, v in stats.items()}])
    for name in {*SFTTrainer.stats, *DPOTrainer.stats}:
        yield from (f"train/{name}", f"eval/{name}")


def of_datapipe() -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(TrainerRequestHandler._metrics)))
    numbers = max((n for n in ast.walk(tree) if isinstance(n, ast.Dict)), key=lambda n: len(n.keys))
    own = [key.value for key in numbers.keys if isinstance(key, ast.Constant)]
    assert len(own) > 5
    for name in [*own, *IdleClock().take(), "stale_below_512", "filtered_zero_variance"]:
        yield f"datapipe/{name}"


def of_workers() -> Iterator[str]:
    source = (PACKAGE / "impl/rollout/worker.py").read_text()
    counted = re.findall(r'counters\["(\w+)"\]', source)
    assert len(counted) > 3
    resumed = re.findall(r'self.resumed\["(\w+)"\]', inspect.getsource(collector))
    client = [f"client_{name}" for name in (*COUNTERS, "in_flight")]
    own = ["running", "loop_lag_max_s", "failed_timeout", *(f"{what}_wait_s" for what in waited())]
    for name in [*counted, *resumed, *client, *own]:
        yield f"rollout/{name}"


def waited() -> list[str]:
    """List the metrics of waits of episodes."""
    (found,) = re.findall(r"waits=\{(.*?)\}", inspect.getsource(collector), re.DOTALL)
    return re.findall(r'"(\w+)":', found)


@pytest.fixture(scope="module")
def written() -> set[str]:
    sources: list[Callable[[], Iterator[str]]] = [
        literals,
        of_trajectories,
        of_updates,
        of_datapipe,
        of_workers,
    ]
    return {name for source in sources for name in source()}


def test_every_written_metric_is_documented(written: set[str]) -> None:
    assert len(written) > 150
    assert sorted(name for name in written if describe(name) is None) == []


def test_every_documented_metric_is_written(written: set[str]) -> None:
    nobody = [
        name
        for pattern in catalogue()
        for name in spelled(pattern)
        if not any(re.fullmatch(re.sub("<.*?>", ".+", name), each) for each in written)
    ]
    assert nobody == []


def test_closest_pattern_describes_a_metric() -> None:
    assert describe("reward/mean") == catalogue()["reward/{mean,min,max,std}"]
    assert describe("reward/openai/gsm8k/mean") == catalogue()["reward/<source>/mean"]
    assert describe("reward/parts/mean") == catalogue()["reward/parts/<part>"]
    assert describe("eval/pass@8") == catalogue()["eval/pass@<k>"]
    assert describe("reward/other") is None
    assert metric_names.describe("nothing") is None


def test_each_description_is_one_short_line() -> None:
    for pattern, text in catalogue().items():
        assert "\n" not in text, pattern
        assert 3 < len(text) < 130, pattern
        assert text[0].lower() == text[0] or text.startswith(("KL", "|")), pattern


def spelled(pattern: str) -> Iterator[str]:
    """Yield the names of a pattern, one for each combination of alternatives."""
    pieces = [
        piece[1:-1].split(",") if piece.startswith("{") else [piece]
        for piece in re.split(r"(\{.*?\})", pattern)
    ]
    yield from map("".join, itertools.product(*pieces))

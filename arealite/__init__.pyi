from arealite.api.agent import Agent as Agent
from arealite.api.agent import agents as agents
from arealite.api.engine import TrainEngine as TrainEngine
from arealite.api.env import Env as Env
from arealite.api.env import StepEnv as StepEnv
from arealite.api.env import StepResult as StepResult
from arealite.api.env import envs as envs
from arealite.api.episode import Action as Action
from arealite.api.reward import Reward as Reward
from arealite.api.reward import Score as Score
from arealite.api.reward import rewards as rewards
from arealite.api.task import Row as Row
from arealite.api.task import Task as Task
from arealite.api.tool import Tool as Tool
from arealite.api.tool import tools as tools
from arealite.api.trainer import Trainer as Trainer
from arealite.base.errors import UserError as UserError
from arealite.impl.env.requests import make as make
from arealite.python.functions import collect as collect
from arealite.python.functions import evaluate as evaluate
from arealite.python.functions import serve as serve
from arealite.python.functions import train as train
from arealite.python.run import Run as Run

__version__: str

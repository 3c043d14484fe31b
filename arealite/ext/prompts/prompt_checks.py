"""Checks that prompts fit the model's tokenizer and the servers' context. Imports no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from arealite.api.agent import agents, load_tokenizer
from arealite.api.env import envs
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import RunFacts
from arealite.api.observation import ChatMessage, messages
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.model_folder import read_json, vocab_size
from arealite.cli.preflight import print_row
from arealite.ext.prompts.rendering_probes import dropped_messages, rendered_marker, unread_keys
from arealite.system.data.tasks import FIRST_ROWS
from arealite.system.data.templates import render_prompt, tokenize

ANSWER = "trainer.ppo.collector.sampling.max_new_tokens (for `eval`: trainer.ppo.eval.sampling)"


def has_chat_template(folder: Path | str) -> bool:
    """Return whether the tokenizer in a folder has a chat template."""
    template_file = Path(folder).expanduser() / "chat_template.jinja"
    if template_file.is_file():
        return True
    settings = read_json(folder, "tokenizer_config.json")
    return bool(settings.get("chat_template"))


def check_run(config: ExperimentConfig, facts: RunFacts) -> Iterable[tuple[str, str]]:
    """Check that the prompts of a run fit; print how texts are sent (hook `check`)."""
    if config.trainer.is_offline:
        return []
    tasks = [*facts.train_tasks, *facts.eval_tasks]
    check_prompts(config, tasks, facts.contexts)
    line = template_line(config, tasks)
    if line:
        print_row("prompts", line)
    return []


def check_prompts(
    config: ExperimentConfig,
    tasks: Sequence[Task],
    contexts: Sequence[int],
) -> None:
    """Check that every prompt and its answer fit the context of all servers.

    Args:
        config: The experiment.
        tasks: Training and held-out tasks.
        contexts: Context length of each known server, in tokens; [] skips the check.

    Raises:
        UserError: a prompt is too long or has invalid tokens, or the model has no tokenizer.
    """
    if not contexts:
        return
    ppo = config.trainer.ppo
    max_new_tokens = ppo.collector.sampling.max_new_tokens
    if config.evaluates:
        max_new_tokens = max(max_new_tokens, ppo.eval.sampling.max_new_tokens)
    context = min(contexts)
    if max_new_tokens >= context:
        raise UserError(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the server's context "
            f"of {context} tokens. Lower {ANSWER}."
        )
    if not any(Path(config.model.path).expanduser().glob("tokenizer*")):
        raise UserError(f"model.path={config.model.path} has no tokenizer. Save one beside it.")
    if "" not in _prompt_uses(config):
        check_tokens(config.model.path, tasks)
    _check_lengths(config.model.path, tasks, context, max_new_tokens)


def _prompt_uses(config: ExperimentConfig) -> set[str]:
    """Return what a row's prompt is to the agents of each environment (`Env.prompt_use`)."""
    parts = config.trainer.ppo.collector.parts
    return {envs.get(part.env.type).prompt_use for part in parts.values()}


def _have_own_agents(config: ExperimentConfig) -> list[bool]:
    """Return of each environment whether it brings its own agents, which write the prompts."""
    parts = config.trainer.ppo.collector.parts
    return [envs.get(part.env.type).has_own_agents for part in parts.values()]


def _check_lengths(
    path: str,
    tasks: Sequence[Task],
    context: int,
    max_new_tokens: int,
) -> None:
    """Check that every prompt and an answer fit a context.

    Args:
        path: The model's folder.
        tasks: Training and held-out tasks.
        context: Tokens of a prompt and its answer.
        max_new_tokens: Tokens of an answer.

    Raises:
        UserError: a prompt is too long.
    """
    # Loading a tokenizer takes seconds, so short prompts are skipped: at most 2 tokens per byte.
    max_prompt_tokens = context - max_new_tokens
    long_tasks = [task for task in tasks if _text_length(task.prompt) * 2 + 64 > max_prompt_tokens]
    if not long_tasks:
        return
    tokenizer: Any = load_tokenizer(path)
    for task in long_tasks:
        try:
            num_tokens = len(tokenize(tokenizer, task.prompt))
        except UserError as error:
            raise UserError(f"row {task.task_id}: {error}") from error
        if num_tokens > max_prompt_tokens:
            raise UserError(
                f"row {task.task_id}: its prompt has {num_tokens} tokens, with max_new_tokens "
                f"{max_new_tokens} that is over the server's context of {context}. "
                f"Remove the row, lower {ANSWER} or raise llm_server.context_length."
            )


def template_line(config: ExperimentConfig, tasks: Sequence[Task]) -> str:
    """Return how the texts of the tasks are sent; "" if they are sent as the options say.

    Raises:
        UserError: An agent needs a chat template, and the model has none.
    """
    has_template = has_chat_template(config.model.path)
    collector = config.trainer.ppo.collector
    if all(_have_own_agents(config)):
        return ""
    for agent in collector.agents:
        key = f"trainer.ppo.collector.agent.{agent.type}.use_chat_template"
        options = agents.options(agent)
        use_template = getattr(options, "use_chat_template", False)
        if use_template and not has_template:
            raise UserError(f"{key}=true, but the model has no chat template. Remove the option.")
        is_default = use_template is None and _system_prompt(options) is None
        has_texts = any(isinstance(task.prompt, str) for task in tasks)
        if has_template and is_default and has_texts:
            return f"texts go into the model's chat template; for plain text: {key}=false"
    return ""


def uses_template(config: ExperimentConfig, tasks: Sequence[Task]) -> bool:
    """Return whether prompts go through the chat template of the trained model."""
    collector = config.trainer.ppo.collector
    if any(_have_own_agents(config)) or any(not isinstance(task.prompt, str) for task in tasks):
        return True
    for agent in collector.agents:
        if not agents.get(agent.type).trainable:
            continue
        options = agents.options(agent)
        if not hasattr(options, "system_prompt"):  # a scripted agent
            continue
        use_template = getattr(options, "use_chat_template", None)
        is_plain = use_template is False and options.system_prompt is None
        if not is_plain:
            return True
    return False


def check_rendering(
    config: ExperimentConfig,
    tasks: Sequence[Task],
    tokenizer: Any,
) -> list[str]:
    """Check that the chat template renders the prompts of tasks as they are written.

    Returns:
        A warning for each key of messages that the template does not render.

    Raises:
        UserError: a prompt is rendered already; or the template refuses it, leaves out one of its
            messages, or changes the beginning of its answer.
    """
    if not _prompt_uses(config) <= {"first", "only"}:
        return []
    first_rows = dict[str, str]()
    for agent in config.trainer.ppo.collector.agents:
        is_templated = vars(agents.get(agent.type)).get("templates_observation", False)
        if not is_templated:  # a derived agent may change the prompt
            continue
        options = agents.options(agent)
        first_number = 1 if _system_prompt(options) is None else 0
        checked_forms = set[str]()
        for task in tasks:
            chat = _sent_chat(task, options, tokenizer)
            if not chat:
                continue
            try:
                unread = _check_chat(chat, first_number, tokenizer, checked_forms)
            except UserError as error:
                raise UserError(f"row {task.task_id}: {error}") from error
            first_rows = {**dict.fromkeys(unread, task.task_id), **first_rows}
    return [
        f"the chat template does not render `{key}` of a message, as in row {row}"
        for key, row in first_rows.items()
    ]


def _sent_chat(task: Task, options: Any, tokenizer: Any) -> list[ChatMessage]:
    """Return the messages that an agent sends through the chat template; [] for a plain text."""
    is_templated = getattr(options, "use_chat_template", True)
    if is_templated is None:
        is_templated = bool(tokenizer.chat_template)
    system_prompt = _system_prompt(options)
    if isinstance(task.prompt, str) and not is_templated and system_prompt is None:
        return []
    return messages(task.prompt, system=system_prompt)


def _system_prompt(options: object) -> str | None:
    """Return an agent's system prompt; None also if the agent has no such option."""
    return getattr(options, "system_prompt", None)


def _check_chat(
    chat: list[ChatMessage],
    first_number: int,
    tokenizer: Any,
    checked_forms: set[str],
) -> list[str]:
    """Check a conversation; return the keys of messages that the template does not render.

    Args:
        chat: The messages.
        first_number: Number of the first message in errors: 1; 0 for the agent's system_prompt.
        tokenizer: Has the chat template.
        checked_forms: Roles and keys of earlier conversations, which are checked in part only.
    """
    names = [
        f"message {number} ({message['role']})" for number, message in enumerate(chat, first_number)
    ]
    for name, message in zip(names, chat, strict=True):
        marker = rendered_marker(tokenizer, str(message.get("content") or ""))
        if marker:
            raise UserError(
                f"{name} of its prompt contains {marker}, so it is rendered already, and the "
                "model's chat template would render it again. Write only the text of the message; "
                "agent.math_code_single_step.use_chat_template=false sends a text as it is."
            )
    roles_and_keys: list[tuple[object, list[str]]] = []
    for message in chat:
        keys = [key for key in message if message[key]]
        roles_and_keys.append((message["role"], keys))
    form = str(roles_and_keys)
    is_checked = form in checked_forms
    checked_forms.add(form)
    if not is_checked or chat[-1]["role"] == "assistant":
        render_prompt(tokenizer, chat)
    if is_checked:
        return []
    if dropped := dropped_messages(tokenizer, chat):
        raise UserError(
            f"the model's chat template leaves out {names[dropped[0]]} of its prompt. Put the text "
            "into a message of the user, remove it, or use another template."
        )
    return unread_keys(tokenizer, chat)


def check_tokens(path: str, tasks: Sequence[Task]) -> None:
    """Check that the text prompts of the first rows have only tokens of the model's vocabulary.

    Raises:
        UserError: a prompt has no token or an unknown token, or the tokenizer is not readable.
    """
    from tokenizers import Tokenizer

    file = Path(path).expanduser() / "tokenizer.json"
    text_tasks = [task for task in tasks[:FIRST_ROWS] if isinstance(task.prompt, str)]
    num_token_ids = vocab_size(read_json(path)) or 1 << 62
    if not text_tasks or not file.is_file():
        return
    try:
        encode = Tokenizer.from_file(str(file)).encode_batch
    except Exception as error:  # tokenizers has no narrower class
        raise UserError(f"{file} cannot be read: {error}. Download it again.") from error
    encodings = encode([str(task.prompt) for task in text_tasks], add_special_tokens=False)
    for task, encoding in zip(text_tasks, encodings, strict=True):
        if not encoding.ids or max(encoding.ids) >= num_token_ids:
            largest = max(encoding.ids, default="no token")
            raise UserError(
                f"row {task.task_id}: the tokenizer of model.path={path} makes {largest} of its "
                f"prompt; the model has {num_token_ids} tokens. "
                "Remove the row, or use another tokenizer."
            )


def longest_request(config: ExperimentConfig, tasks: Sequence[Task]) -> int | None:
    """Return a bound for the tokens of a request: a token for each byte of its prompt.

    None: conversations of several turns can fill the context.
    """
    if _prompt_uses(config) != {"only"}:
        return None
    ppo = config.trainer.ppo
    collector = ppo.collector
    system_prompt = _system_prompt(agents.options(collector.agent)) or ""
    answer = max(collector.sampling.max_new_tokens, ppo.eval.sampling.max_new_tokens)
    prompt = max(_text_length(task.prompt) for task in tasks)
    return answer + len(system_prompt.encode()) + 64 + prompt


def _text_length(prompt: str | list[dict[str, Any]]) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(str(message).encode()) + 32 for message in prompt)

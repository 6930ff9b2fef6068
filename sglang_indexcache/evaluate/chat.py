"""Any engine behind OpenAI's chat completions: it writes answers, and nobody knows which pattern.

Nothing but its address says what it runs, so an arm is an address. What can be checked is checked:
the tokens that it counts in a prompt are those of the checkpoint's own tokenizer and chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from sglang_indexcache.ask.protocol import RankState
from sglang_indexcache.client import Client
from sglang_indexcache.errors import QualityError, ServerError
from sglang_indexcache.evaluate.metrics import METRICS
from sglang_indexcache.evaluate.plan import Material
from sglang_indexcache.evaluate.scoring import Engine, Said, Scored, Voice, patience
from sglang_indexcache.evaluate.tasks import Context, Question
from sglang_indexcache.evaluate.tasks.items import Message

SPARE = 1024
"""Tokens that a reply may have beyond the right answer's: whoever chats says more than that."""
_AT_ONCE = 8
"""Questions behind a context that are asked at the same time, once the first one is answered."""


def is_chat(url: str) -> bool:
    """Whether an address is that of chat completions: it ends as ``OPENAI_BASE_URL`` does."""
    return urlsplit(url).path.rstrip("/").endswith("/v1")


class ChatEndpoint(Client):
    """A model behind ``URL/v1/chat/completions``.

    Args:
        url: up to ``/v1``; ``#MODEL`` behind it where the endpoint has several models.
        api_key: the endpoint's.

    Raises:
        QualityError: the endpoint does not say which model it has, or has several.
        ServerError: it refused, or is no such endpoint.
        ServerUnavailableError: it does not answer.
    """

    def __init__(self, url: str, timeout: float = 600.0, *, api_key: str | None = None) -> None:
        address, _, wanted = url.partition("#")
        super().__init__(address, timeout, api_key=api_key)
        listed = self._request("GET", "/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
            raise QualityError(
                f"{self.url}/models lists no models. Is this the address of an OpenAI-compatible "
                "server, such as http://127.0.0.1:8000/v1?"
            )
        known = {str(one.get("id")): one for one in models}
        if not wanted and len(known) == 1:
            [wanted] = known
        if wanted not in known:
            raise QualityError(
                f"{self.url} has the models {', '.join(known) or 'none'}: say which, as "
                f"{self.url}#MODEL"
            )
        self.model, self._about = wanted, known[wanted]

    def states(self) -> list[RankState]:
        """Nothing: such an endpoint does not say which pattern it runs."""
        return []

    def server_info(self) -> dict[str, Any]:
        """What the endpoint says of its model, by SGLang's names."""
        info = {"version": f"chat completions of {self._about.get('owned_by', 'an engine')}"}
        longest = self._about.get("max_model_len")
        return info if longest is None else info | {"max_req_input_len": longest}

    def is_ready(self) -> bool:
        """Whether the endpoint answers requests."""
        try:
            self._request("GET", "/models", timeout=5.0)
        except ServerError:
            return False
        return True

    def chat(self, messages: Sequence[Message], most: int, timeout: float) -> dict[str, Any]:
        """A greedy reply of at most ``most`` tokens, as the endpoint has it.

        Raises:
            ServerUnavailableError: no answer, or half of one.
            ServerError: the endpoint refused.
            QualityError: no chat completion.
        """
        body = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": most,
            "temperature": 0.0,
        }
        found = self._request("POST", "/chat/completions", body, timeout)
        choices = found.get("choices") if isinstance(found, dict) else None
        if (
            not isinstance(choices, list)
            or len(choices) != 1
            or not isinstance(choices[0], dict)
            or not isinstance(choices[0].get("message"), dict)
        ):
            raise QualityError(
                f"{self.url} answered something that is no chat completion. Is there another "
                "program at this address?"
            )
        return dict(found)


def make_chat_ask(
    material: Material, selects_all: int, spare: int = SPARE
) -> Callable[[Engine, Context, Sequence[Voice]], list[Scored]]:
    """A way to have answers, for `arms`.

    Args:
        material: what contexts are made of; it counts tokens.
        selects_all: ``index_topk``: replies to the control end before it.
        spare: see :data:`SPARE`.
    """

    def ask(engine: Engine, context: Context, voices: Sequence[Voice]) -> list[Scored]:
        assert isinstance(engine, ChatEndpoint)
        return [_reply(engine, context, material, selects_all, spare) for _ in voices]

    return ask


def _reply(
    endpoint: ChatEndpoint, context: Context, material: Material, selects_all: int, spare: int
) -> Scored:
    def one(question: Question) -> tuple[Said, int]:
        return _said(endpoint, context, question, material, selects_all, spare)

    first, *others = context.questions
    found = [one(first)]  # its prefix is then in the engine's cache, if it has one
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found += pool.map(one, others)
    return Scored([said for said, _ in found], 0, sum(tokens for _, tokens in found))


def _said(
    endpoint: ChatEndpoint,
    context: Context,
    question: Question,
    material: Material,
    selects_all: int,
    spare: int,
) -> tuple[Said, int]:
    messages = material.conversation(context, question)
    own, slack = material.count(messages)
    most = len(question.answer) + spare
    is_control = context.length <= selects_all
    if is_control:
        most = max(len(question.answer), min(most, selects_all - own))
    reply = endpoint.chat(messages, most, patience(own))
    counted = _counted(endpoint, reply, context, own, slack)
    choice = reply["choices"][0]
    text = str(choice["message"].get("content") or "")
    score = METRICS[context.task](text, question.answer_text)
    said = Said(
        question.name,
        None if question.depth is None else round(question.depth, 6),
        len(question.answer),
        right=score == 1.0,
        reply=text,
        score=score,
        # A reply to the control has to end before other tokens than all could be selected.
        cut=choice.get("finish_reason") == "length" and not is_control,
    )
    return said, counted


def _counted(
    endpoint: ChatEndpoint, reply: Mapping[str, Any], context: Context, own: int, slack: int
) -> int:
    """Tokens of the prompt as the endpoint counts them, if they are those that were sent."""
    told = (reply.get("usage") or {}).get("prompt_tokens")
    if not isinstance(told, int):
        raise QualityError(
            f"{endpoint.url} does not say how many tokens a prompt has (usage.prompt_tokens), so "
            "a prompt that it cut would go unseen. Ask an engine that does."
        )
    if abs(told - own) > slack:
        cause = "cuts long prompts, or has" if told < own else "has"
        raise QualityError(
            f"{endpoint.url} read {told:,} tokens in a prompt ({context.name}) that has {own:,} by "
            f"the tokenizer and chat template of --model: it {cause} another tokenizer or chat "
            "template. Give it a context that holds the prompts, or ask for shorter ones "
            "(--length); and give --model the folder that it serves."
        )
    return told


def check_only_chat(servers: Mapping[str, Client]) -> bool:
    """Whether all servers are asked by chat completions.

    Raises:
        QualityError: some are, and some are not.
    """
    chatting = [name for name, server in servers.items() if isinstance(server, ChatEndpoint)]
    if chatting and len(chatting) < len(servers):
        raise QualityError(
            f"{', '.join(chatting)} is asked by chat completions (its address ends in /v1) and the "
            "others by SGLang's /generate, which is another question; ask all in the same way"
        )
    return bool(chatting)

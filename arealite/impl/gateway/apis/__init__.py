"""The HTTP APIs of the gateway, by path."""

from arealite.impl.gateway.apis.anthropic import Messages
from arealite.impl.gateway.apis.chat import ChatCompletions, Completions
from arealite.impl.gateway.apis.responses import Responses
from arealite.impl.gateway.apis.shared import Api

APIS: dict[str, Api] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
APIS["/v1/messages/count_tokens"] = APIS["/v1/messages"]

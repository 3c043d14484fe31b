"""The HTTP APIs of the gateway, by path."""

from arealite.ext.gateway.apis.anthropic import Messages
from arealite.ext.gateway.apis.chat_completions import ChatCompletions, Completions
from arealite.ext.gateway.apis.common import Api
from arealite.ext.gateway.apis.responses import Responses

APIS: dict[str, Api] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
APIS["/v1/messages/count_tokens"] = APIS["/v1/messages"]

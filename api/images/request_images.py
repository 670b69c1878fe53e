"""The images of a chat request: finds them, checks them, and puts them into the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.api.preparation.preparation import FetchNeededError, Preparation
from ostinato.api.schemas.chat_completions import ChatCompletionRequest
from ostinato.api.schemas.conversation import Message
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.images.image_inputs import check_images, prepare_images, urls_to_fetch
from ostinato.runtime.images.image_sources import ImageSource
from ostinato.runtime.images.placeholders import expand_placeholders
from ostinato.runtime.images.template_images import with_images_shown
from ostinato.runtime.types.images import PromptImage

__all__ = ("RequestImages", "refuse_fields_with_images")

_PARAM = "messages"
# Fields that count the prompt's tokens or text -> why they cannot be combined with images.
_REFUSED = {
    "truncate_prompt_tokens": "a prompt with images is not truncated",
    "prompt_logprobs": "the tokens of images have no log-probabilities",
    "return_token_offsets": "the tokens of images have no characters",
    "echo": "a prompt with images is not repeated",
}


class RequestImages:
    """The images of a conversation, in the order of the messages and their parts.

    Args:
        preparation: the model and the settings.
        messages: the conversation.
        fetched: URL -> the bytes that were fetched.

    Raises:
        InvalidRequestError: the model takes no images, there are too many, or a URL is refused.
        FetchNeededError: images must be fetched first.
        ForkNeededError: this process also prepares other requests.
    """

    def __init__(
        self, preparation: Preparation, messages: Sequence[Message], fetched: Mapping[str, bytes]
    ) -> None:
        self._preparation = preparation
        self._fetched = fetched
        self._sources = [
            ImageSource(url=image.url, is_small=image.is_small)
            for message in messages
            for image in message.images
        ]
        if not self._sources:
            return
        config = preparation.settings.images
        check_images(self._sources, preparation.model, config, param=_PARAM)
        wanted = urls_to_fetch(self._sources, config, param=_PARAM)
        missing = {url: name for url, name in wanted.items() if url not in fetched}
        if missing:
            raise FetchNeededError(missing)
        preparation.require_own_fork()

    def shown(self, conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """The messages in the form that a template reads; see `with_images_shown`."""
        spec = self._preparation.model.images
        return conversation if spec is None else with_images_shown(conversation, template, spec)

    def placed(self, token_ids: list[int]) -> tuple[list[int], list[PromptImage]]:
        """Decode the images. Returns the prompt with a placeholder token for each embedding.

        Args:
            token_ids: the prompt with one placeholder token for each image.

        Raises:
            InvalidRequestError: an image is refused, or the prompt has another number of
                placeholder tokens.
        """
        model = self._preparation.model
        if model.images is None:
            return token_ids, []
        images = prepare_images(
            self._sources,
            model,
            self._preparation.settings.images,
            param=_PARAM,
            fetched=self._fetched,
            begin=self._preparation.begin_image,
        )
        return expand_placeholders(token_ids, images, model.images, param=_PARAM)


def refuse_fields_with_images(body: ChatCompletionRequest) -> None:
    """Raises InvalidRequestError if a request with images has a field that needs text only."""
    if not any(message.images for message in body.messages):
        return
    for name, reason in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value is not False:
            raise InvalidRequestError(
                f"{name} cannot be combined with images: {reason}; leave it out",
                param=name,
                code="unsupported_parameter",
            )

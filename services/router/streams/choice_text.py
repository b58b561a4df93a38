"""The text of one choice: token ids in, text that will not change out, cut at the first stop string. Pure."""

from services.core.ids import TokenId
from services.router.text.detokenize import Detokenizer, StopMatcher, StopStrings
from services.router.text.vocabulary import Vocabulary


class ChoiceText:
    """Detokeniser and stop matcher of one choice. `stops` None: nothing is matched, and nothing ever held for it."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, vocabulary: Vocabulary, stops: StopStrings | None) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._matcher = None if stops is None else StopMatcher(stops)

    @property
    def is_stopped(self) -> bool:
        """True once a stop string was found: the text is complete."""
        return self._matcher is not None and self._matcher.hit is not None

    def push(self, token_id: TokenId) -> str:
        """The text that this token made final; may be empty."""
        text = self._detokenizer.push((token_id,))
        return text if self._matcher is None else self._matcher.push(text)

    def finish(self) -> str:
        """What was held back, at the end of the output; it may complete a stop string and end before it."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return text
        final = self._matcher.push(text, num_tokens=0)
        return final if self.is_stopped else final + self._matcher.flush()

"""What an instrument asks: free text, so that what a model answers hangs on all of what it has read."""

from tools.load.load import Ask

OPENINGS = (
    "The old lighthouse keeper had a secret that nobody in the village knew. Every night, when the fog came in from",
    "My grandmother's recipe for bread begins with flour and water, but what she did next surprised everyone, because",
    "In the middle of the desert stood a library with no doors. A traveller who came there in the spring said that",
    "Letters between the two astronomers show how they argued about a comet. The first, written in winter, says",
    "When the machine was switched on for the first time, the engineers noticed that its clock ran backwards, and so",
    "A fox, a crow and a tortoise once agreed to share a garden. For a year all went well, until one morning the crow",
    "The history of the small island is a history of storms. In the year when the great bridge was built, its people",
    "She opened the wooden box and found a map, three coins and a note in a language that she could not read. Then",
)


def asks_of(num_streams: int, num_tokens: int, first: int = 1) -> list[Ask]:
    """A prompt for each stream, none the beginning of another; `first` numbers them, so that caches do not meet."""
    return [
        Ask(f"Story {first + stream}. {OPENINGS[(first + stream) % len(OPENINGS)]}", num_tokens)
        for stream in range(num_streams)
    ]

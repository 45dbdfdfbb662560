"""Questions of TypeSafe's own SDK, which checks each field of an answer, and its errors."""

import os

from typesafe_sdk import Choice, Noul, RetryPolicy, Score, TypeSafeAPIError, TypeSafeClient

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
STATE = {"ticket": "I was charged twice this month, please fix it.", "history": ["Hello?", "Anybody?"]}


def main() -> None:
    """Raises where an answer is not what the SDK expects."""
    client = TypeSafeClient(api_key="none", base_url=URL, model=MODEL, timeout=300, retry=RetryPolicy(max_retries=0))
    with client:
        told = client.system_one(
            state=STATE,
            questions={
                "billing": Noul(instructions="Is this about billing?", criteria={"true": "money", "false": None}),
                "team": Choice(criteria={"billing": "charges", "support": None}, instructions={"task": "pick"}),
                "urgency": Score(instructions="How urgent?", criteria=["low", {"level": "high"}]),
            },
        )
        assert told.model == MODEL and told.request_id.startswith("req_") and told.usage.input_tokens
        assert 0 <= told.nouls["billing"].noul <= 1 and told.choices["team"].choice in ("billing", "support")
        assert set(told.scores["urgency"].probabilities) == {0, 1}
        assert told.scores["urgency"].legend == {0: "low", 1: {"level": "high"}}
        assert "422 questions.q: it has 11 options; from 1 to 10 are taken" in refusal(client)


def refusal(client: TypeSafeClient) -> str:
    """What the server says of a scale of eleven levels."""
    try:
        client.system_one(state="x", questions={"q": {"type": "score", "criteria": ["a"] * 11}})
    except TypeSafeAPIError as error:
        return str(error)
    raise AssertionError("a scale of eleven levels was answered")


main()

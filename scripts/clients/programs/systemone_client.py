"""Questions of systemone-client: every type, an asynchronous client, and a server's errors."""

import asyncio
import os

from systemone import AsyncClient, Choice, Client, Noul, Score
from systemone.client import SystemOneError

URL, MODEL = os.environ["BASE_URL"], os.environ["MODEL"]
STATE = {"email": {"from": "it-support@examp1e.com", "body": "Verify your password now"}}
TEAMS = {f"team {number}": None for number in range(20)}


def main() -> None:
    """Raises where an answer is not what the client expects."""
    with Client(URL, api_key="none", timeout=300, model=MODEL) as client:
        questions = {
            "phishing": Noul("Is this a phishing attempt?", criteria="asks for a secret"),
            "team": Choice("Which team?", {"billing": "Charges", "technical": {"about": "bugs"}, "other": None}),
            "urgency": Score("How urgent is it?", ["can wait", "this week", "today"]),
            "raw": {"type": "noul", "instructions": "Is it short?", "criteria": {"true": "few words", "false": None}},
        }
        told = client.system_one(STATE, questions)
        assert told.model == MODEL and told.usage.input_tokens > 0 and told.usage.output_tokens == 0
        assert 0 <= told.nouls["phishing"].noul <= 1 and 0 <= told.nouls["raw"].noul <= 1
        team, urgency = told.choices["team"], told.scores["urgency"]
        assert set(team.probabilities) == {"billing", "technical", "other"} and team.choice in team.probabilities
        assert abs(sum(team.probabilities.values()) - 1) < 1e-6 and 0 <= team.confidence <= 1
        assert urgency.legend == {"0": "can wait", "1": "this week", "2": "today"} and 0 <= urgency.score <= 2
        again = client.system_one(STATE, questions)
        assert again.raw["usage"]["cached_tokens"] > told.raw["usage"]["cached_tokens"]
        many = client.system_one("Hello.", {"team": Choice("Which team?", TEAMS)})
        assert len(many.choices["team"].probabilities) == 20
        assert "from 1 to 255" in refusal(client, {"type": "choice", "criteria": {}})


def refusal(client: Client, question: dict) -> str:
    """What the server says of a wrong question."""
    try:
        client.system_one(STATE, {"wrong": question})
    except SystemOneError as error:
        return f"{error.status} {error.detail}"
    raise AssertionError("a wrong question was answered")


async def side_by_side() -> None:
    """Several states at once."""
    async with AsyncClient(URL, timeout=300) as client:
        spam = {"spam": Noul("Is this spam?")}
        results = await asyncio.gather(*(client.system_one(text, spam) for text in ("WIN A CRUISE", "Lunch at 1pm?")))
        assert all(0 <= one.nouls["spam"].noul <= 1 for one in results)


main()
asyncio.run(side_by_side())

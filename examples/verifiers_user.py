"""A verifiers environment in which a simulator of `soul serve` is the user: bound mode.

soul serve RUN --persona personas.jsonl --scenario scenarios.jsonl --end finish --model-name sim
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

GREETING = {"role": "assistant", "content": "Hello, how can I help?"}


class SimulatedUser(vf.MultiTurnEnv):
    """The person answers every reply of the agent; its own end stops the rollout."""

    simulator = AsyncOpenAI(base_url="http://127.0.0.1:8799/v1", api_key="none")

    async def setup_state(self, state: Any, **kwargs: Any) -> Any:
        state["prompt"] = [*state["prompt"], *await self.said(state["prompt"], state)]
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return await self.said(messages, state)

    async def said(self, messages: Any, state: Any) -> list[dict[str, Any]]:
        """The person's next message."""
        reply = await self.simulator.chat.completions.create(
            model="sim", messages=[m for m in messages if m["role"] != "system"],
            extra_headers={"X-Conversation-Id": state["trajectory_id"]},
        )  # fmt: skip
        choice = reply.choices[0]
        message = {"role": "user", "content": choice.message.content}
        if getattr(choice, "stop_reason", None) == "end_of_conversation":
            state["final_env_response"] = [message]
        return [message]


def load_environment(rollouts: int = 100, max_turns: int = 12) -> vf.Environment:
    """Rollouts that begin with the agent's greeting; replace the reward with your own."""
    rubric = vf.Rubric(funcs=[lambda completion, **_: float(len(completion) > 1)])
    rows = Dataset.from_list([{"prompt": [GREETING]} for _ in range(rollouts)])
    return SimulatedUser(dataset=rows, rubric=rubric, max_turns=max_turns)

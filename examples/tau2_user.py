"""A simulator of `soul serve` as the user in tau2: plain mode, because tau2 brings its own prompt.

soul serve RUN --port 8799 --model-name sim
python examples/tau2_user.py retail openai/my-agent

Users of the domain telecom call tools: serve the model with vLLM for it (--engine vllm).
"""

from __future__ import annotations

import sys


def main(domain: str, agent: str) -> None:
    from tau2.data_model.simulation import TextRunConfig
    from tau2.run import run_domain

    simulator = {"api_base": "http://127.0.0.1:8799/v1", "api_key": "none", "temperature": 1.0}
    run_domain(TextRunConfig(
        domain=domain, agent="llm_agent", llm_agent=agent, user="user_simulator",
        llm_user="openai/sim", llm_args_user=simulator,
    ))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])

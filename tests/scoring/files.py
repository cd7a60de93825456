"""Small files of episodes in other people's formats, written by hand after their published schemas."""

import json
from pathlib import Path

DATA = Path(__file__).parents[3] / "shared" / "data"  # the real files, where a checkout has them beside it


def write_json(path, document):
    path.write_text(json.dumps(document))
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(*actions, prompt="where is it?"):
    """A conversation in which the user answers "go on" to each action but the last."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": prompt}]
    for index, action in enumerate(actions):
        messages += [{"role": "user", "content": "go on"}] if index else []
        messages.append({"role": "assistant", "content": action})
    return messages


def tau_bench_item(task_id, trial, reward, actions=("hello",)):
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"id": 1}'}}
    traj = [
        *chat(*actions),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "find", "content": "nothing"},
    ]
    return {"task_id": task_id, "trial": trial, "reward": reward, "info": {"source": "user"}, "traj": traj}


def tau2_file(*rewards):
    def simulation(trial, reward):
        call = {"id": "c", "name": "find", "arguments": {"id": 1}, "requestor": "assistant"}
        messages = [
            {"role": "assistant", "content": "Hi!", "tool_calls": None, "turn_idx": 0},
            {"role": "user", "content": "find 1", "tool_calls": None, "turn_idx": 1},
            {"role": "assistant", "content": None, "tool_calls": [call], "turn_idx": 2},
            {"role": "tool", "id": "c", "content": "nothing", "requestor": "assistant", "error": False},
        ]
        return {
            "id": f"sim{trial}",
            "task_id": "airline_3",
            "trial": trial,
            "seed": 1,
            "termination_reason": "user_stop",
            "reward_info": None if reward is None else {"reward": reward, "db_check": None, "action_checks": []},
            "messages": messages,
        }

    simulations = [simulation(trial, reward) for trial, reward in enumerate(rewards)]
    return {"timestamp": "2026-01-01", "info": {}, "tasks": [], "simulations": simulations}


def verifiers_row(prompts=((1, 2), (1, 2, 3, 4, 5, 6)), completions=((3, 4), (7,))):
    """Two turns; the second prompt is the first prompt, its completion and two new ids."""
    trajectory = [
        {
            "prompt": [],
            "completion": [],
            "tokens": {
                "prompt_ids": list(prompt),
                "prompt_mask": [0] * len(prompt),
                "completion_ids": list(completion),
                "completion_mask": [1] * len(completion),
                "completion_logprobs": [-0.5] * len(completion),
            },
            "reward": None,
        }
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    prompt, completion = chat()[1:], [*chat("a", "b")[2:]]
    return {
        "example_id": 7,
        "prompt": prompt,
        "completion": completion,
        "answer": "truth",
        "info": {},
        "reward": 0.5,
        "error": None,
        "is_truncated": False,
        "trajectory": trajectory,
    }


def verifiers_trace():
    def node(parent, role, content, ids=(), mask=(), **rest):
        message = {"role": role, "content": content}
        return {"parent": parent, "message": message, "token_ids": list(ids), "mask": list(mask), **rest}

    nodes = [
        node(None, "system", "be brief", [1], [False]),
        node(0, "user", "where?", [2], [False]),
        node(1, "assistant", "abandoned", [9, 9], [True, True], sampled=True, logprobs=[-3.0, -3.0]),
        node(1, "assistant", "here", [3, 4], [False, True], sampled=True, logprobs=[-0.25], reference_logprobs=[-1.0]),
    ]
    rewards = {"exact": {"score": 1.0, "weight": 0.75}, "format": {"score": 1.0, "weight": 0.25}, "late": None}
    return {"version": 1, "id": "abc", "task": {"type": "t", "data": {"idx": 5}}, "nodes": nodes, "rewards": rewards}


def failure(agents, step, agent, **rest):
    """A Who&When file in which each agent speaks once."""
    history = [{"content": f"step {index}", **speaker} for index, speaker in enumerate(agents)]
    return {
        "question": "?",
        "question_ID": f"q{step}",
        "ground_truth": "!",
        "history": history,
        "mistake_agent": agent,
        "mistake_step": step,
        "mistake_reason": "so",
        **rest,
    }


def hand_crafted(step="2", agent="Orchestrator"):
    roles = ("human", "Orchestrator (thought)", "Orchestrator (-> WebSurfer)", "WebSurfer")
    return failure([{"role": role} for role in roles], step, agent, is_corrected=False)


def generated(step="1", agent="Checker"):
    names = ("Planner", "Checker", "Computer_terminal")
    return failure([{"role": "user", "name": name} for name in names], step, agent, is_correct=False, level=1)

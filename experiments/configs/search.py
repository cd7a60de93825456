"""A tiny transformer learns to search the World Factbook by MPO.

Command: `python -m experiments.train --workdir=runs/search` (or `make train`, which writes to runs/quickstart).
Paper: MPO, METHODS and README; its published (λ, λ_intra, β) = (0.80, 0.95, 1.00) are `config.mpo`'s defaults.
Hardware, time and result to expect: see README's first table.
"""

import ml_collections
from ml_collections import config_dict

from mpo_jax import algorithms


def get_config() -> ml_collections.ConfigDict:
    """The defaults; every key can be set on the command line, as in `--config.mpo.beta=0`."""
    config = ml_collections.ConfigDict()
    config.algorithm = "mpo"
    config.seed = 0
    config.model = "search_tiny"  # a packaged model, a folder that experiments.pretrain wrote, or one of Hugging Face
    config.system = ""  # what a language model is told before the first observation

    config.num_steps = 60
    config.episodes_per_step = 128
    config.group_size = config_dict.placeholder(int)  # by default the algorithm's own: 1 with a critic, else 8 or 16
    config.groups_per_step = config_dict.placeholder(int)  # by default episodes_per_step / group_size
    config.max_pending_groups = config_dict.placeholder(int)  # by default (max_staleness + 1) steps' worth
    config.max_staleness = config_dict.placeholder(int)  # in versions, of a group's oldest token; None: only as above
    config.in_flight_updates = False  # new weights are taken while episodes run, and a free slot waits for no other
    config.straggler_seconds = 300.0  # a group that a worker is slower with is made by another too; 0 for never
    config.group_seconds = config_dict.placeholder(float)  # after which a group's unfinished episodes are cut
    config.correction = ""  # for stale or mismatched samples: "truncated" or "masked" importance weights
    config.epochs = 1
    config.minibatches = 4
    config.microbatches = 1
    config.load_balancing = 0.0  # coefficient of the loss that spreads tokens over experts, where a model has some
    config.reference_decay = 1.0  # of a reference policy that follows the policy from batch to batch; 1 keeps it frozen
    config.router_replay = False  # the rollout keeps the experts of every token, and an update uses them
    config.shared_trunk = config_dict.placeholder(float)  # coefficient of the value loss on one trunk; None: two trunks
    config.row_tokens = 384
    config.row_sequences = 8
    config.row_multiple = 16
    config.mesh = ""  # sizes of axes over all devices, as in "fsdp=4,tensor=2"; without any, one device
    config.value_pretraining_steps = 4
    config.critic_patience = 2  # evaluations without gain in held-out explained variance that end the critic's training

    # Copying is delicate: a run at 6e-4 unlearnt to end its turns and stayed at .5 of training questions.
    config.learning_rate = 2e-4
    config.critic_learning_rate = 6e-4
    config.max_grad_norm = 1.0
    config.adam_b2 = 0.99
    config.optimizer = "adam"  # or adamw, muon
    config.weight_decay = 0.0
    config.warmup_updates = 0
    # To 0 over the updates of num_steps, which a longer run moves; a policy makes fewer of them, by value pretraining.
    config.rate_decay = "linear"  # or cosine, constant

    # Low-rank adapters in place of the parameters; the reference is then what they stand beside.
    config.lora = ml_collections.ConfigDict()
    config.lora.rank = 0  # none: all parameters are trained
    config.lora.alpha = 32.0
    config.lora.targets = ("query", "key", "value", "output", "gate", "up", "down")

    config.num_slots = 64
    config.environment_threads = config_dict.placeholder(int)  # by default one a slot; none for the packaged documents
    config.context_length = 384
    config.max_turn_tokens = 24
    config.max_observation_tokens = 80
    config.turn_limit = 6
    config.renaming = 0.25  # share of training questions over made-up names, so that reading pays, not remembering

    config.server = (
        server()
    )  # that samples the episodes to train on; by default our own sampler in the worker's process

    config.environment = "search"  # or "documents", "adapter": what their sections name
    config.documents = documents()
    config.adapter = adapter()

    # With a threshold the warm start reads along, as the reference: flags go to the metadata of the episodes.
    config.monitor = ml_collections.ConfigDict()
    config.monitor.threshold = config_dict.placeholder(float)  # of the mean Progress Advantage of the turns so far
    config.monitor.min_turns = 2
    config.monitor.stop = False  # end what is flagged, with the reward that it has by then

    # A fixed pair of models, the policy in training apart, whose Progress Advantage is added to every turn's reward.
    config.dense = ml_collections.ConfigDict()
    config.dense.policy = ""  # as for `model`; none, no dense reward
    config.dense.reference = "search_tiny"  # what that policy was trained from
    config.dense.coefficient = 0.1
    config.dense.beta = 1.0

    config.evaluate_every = 20
    config.evaluation_questions = 256
    config.checkpoint_every = 10

    # One section an algorithm, with the defaults of its function; where a tiny environment needs other values, why.
    for name in algorithms.ALGORITHMS:
        plain = {k: config_dict.placeholder(float) if v is None else v for k, v in algorithms.defaults(name).items()}
        plain.pop("group_size", None)  # `config.group_size` is the one that counts
        config[name] = ml_collections.ConfigDict(plain)
    for name in algorithms.CORRECTIONS:
        config[name] = ml_collections.ConfigDict(algorithms.defaults(name))
    # λ = 1 − 1/(αl) is 0 at the paper's α = .05 for episodes of l ≈ 25 action tokens; α = 1 gives it about .96.
    config.vapo.alpha = 1.0
    # A geometric mean over 25 tokens moves much more than one over thousands: the paper's 3e-4 would clip everything.
    for name in ("gspo", "gspo_token"):
        config[name].epsilon_low, config[name].epsilon_high = 0.05, 0.05
    return config


def server() -> ml_collections.ConfigDict:
    """An OpenAI-compatible server as the engine: it must take and give token ids, and read weights from its disk."""
    section = ml_collections.ConfigDict()
    section.url = ""  # as in http://127.0.0.1:8001/v1; none, no server
    section.model = ""  # its name of the model
    section.key_variable = ""  # the environment variable with its key, if it wants one
    section.folder = ""  # where it finds versions as Hugging Face writes them (SGLang); else as they are published
    section.timeout = 600.0  # seconds for one turn
    return section


def documents() -> ml_collections.ConfigDict:
    """A user's own documents and questions; the packaged ones need none of it."""
    section = ml_collections.ConfigDict()
    section.corpus = ""  # JSON lines of {docid, text}
    section.index = ""  # a folder that keeps the index of the corpus; in memory where empty
    section.queries = ""  # JSON lines to train on
    section.held_out = ""  # and to evaluate on; a quarter of the former where empty
    section.format = "queries"  # {query_id, query, answer}, or "gaia", "hle"
    section.qrels = ""  # TREC relevance judgements, for recall
    section.actions = "words"  # as the packaged model writes them, or "tool_calls"
    section.hits = 5
    section.snippet_tokens = 512
    section.grader = "exact"  # or "gaia", "judge"
    section.judge_url = ""  # of an OpenAI-compatible server, as in http://127.0.0.1:8000/v1
    section.judge_model = ""
    section.judge_key_variable = "OPENAI_API_KEY"  # the environment variable with the server's key
    return section


def adapter() -> ml_collections.ConfigDict:
    """An environment that others wrote, or a user's own: any gymnasium environment of text."""
    section = ml_collections.ConfigDict()
    section.target = "mpo_jax.environments.textworld_express:TextWorldExpress"  # package.module:Class
    section.arguments = "{}"  # of the class, as JSON, such as {"game": "mapreader"}
    section.train_tasks = 256  # numbers 0..255, given to its reset as options={"task": …}
    section.held_out_tasks = 64  # and 256..319
    section.seconds = 60.0  # that a reset or a step may take
    return section

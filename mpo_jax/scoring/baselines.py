"""Confidence of one model, with which Progress Advantage is compared. Higher is more confident, unless said.

All take float[n], one number for each action token of an episode, in order, and are NaN without any.
"""

import numpy as np

WINDOW = 2048
SHARE = 0.1


def windows(confidence: np.ndarray, width: int = WINDOW) -> np.ndarray:
    """Means of all windows of `width` consecutive tokens; of the whole where there are fewer.

    See *Deep Think with Confidence* (arXiv:2508.15260), group confidence.

    Args:
      confidence: float[n], C_i = −mean of the 20 highest log-probs (−`Likelihoods.top`).
      width: of a window.

    Returns:
      float64[max(1, n − width + 1)].
    """
    values = np.asarray(confidence, np.float64)
    if values.size <= width:
        return np.array([values.mean() if values.size else np.nan])
    sums = np.cumsum(np.concatenate([[0.0], values]))
    return (sums[width:] - sums[:-width]) / width


def deepconf(confidence: np.ndarray, width: int = WINDOW) -> dict[str, float]:
    """The trace's confidence in each of the paper's forms.

    `mean` of all tokens; `tail`, of the last `width` tokens; `bottom`, mean of the max(1, ⌊.1 · windows⌋) lowest
    windows; `lowest` window. See *Deep Think with Confidence* (arXiv:2508.15260), section 3.
    """
    groups = np.sort(windows(confidence, width))
    number = max(1, int(SHARE * groups.size))
    values = np.asarray(confidence, np.float64)
    return {
        "mean": float(values.mean()) if values.size else float("nan"),
        "tail": float(values[-width:].mean()) if values.size else float("nan"),
        "bottom": float(groups[:number].mean()),
        "lowest": float(groups[0]),
    }


def compat(step_tops: np.ndarray) -> dict[str, float]:
    """Self-Certainty and DeepConf as the code of *Progress Advantage* (arXiv:2606.26080) has them.

    They are made of steps and have the *opposite* sign: mean of the top-20 log-probs, lower where the policy is sure.

    Args:
      step_tops: float[m], that mean over each action step's tokens, steps without tokens left out.
    """
    values = np.sort(np.asarray(step_tops, np.float64))
    if not values.size:
        return dict.fromkeys(("self_certainty", "deepconf_tail", "deepconf_bottom"), float("nan"))
    number = max(1, int(np.ceil(SHARE * values.size - 1e-9)))
    return {
        "self_certainty": float(values.mean()),
        "deepconf_tail": float(step_tops[-1]),
        "deepconf_bottom": float(values[:number].mean()),
    }

"""Every click-through-rate model in small, with a batch, for what traces models and cuts them into parts."""

import torch

from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import DCN, DLRM, DCNv2, DeepFM, FactorizationMachine, LogisticRegression, WideDeep
from lightning_recsys.optim import RowSGD

FIELDS = {f"f{i}": 20 + i for i in range(5)}
BATCH = 7
OPTIONS = {"row_optimizer": RowSGD(0.1), "embedding_dim": 4}
# Constructor, numeric features, arguments.
MODELS = {
    "lr": (LogisticRegression, 3, {"row_optimizer": RowSGD(0.1)}),
    "fm": (FactorizationMachine, 3, OPTIONS),
    "wide_deep": (WideDeep, 3, {"hidden": (6, 4), **OPTIONS}),
    "deepfm": (DeepFM, 3, {"hidden": (6, 4), "normalization": "local", **OPTIONS}),
    "deepfm_without_numbers": (DeepFM, 0, {"hidden": (6, 4), **OPTIONS}),
    "dcn": (DCN, 3, {"hidden": (6, 5), "normalization": "batch", **OPTIONS}),
    "dcn_without_numbers": (DCN, 0, {"hidden": (6,), **OPTIONS}),
    "dcn_v2_full": (DCNv2, 3, {"hidden": (6,), **OPTIONS}),
    "dcn_v2_low_rank": (DCNv2, 3, {"rank": 3, "hidden": (6,), "activation": "gelu", **OPTIONS}),
    "dcn_v2_stacked": (DCNv2, 3, {"rank": 3, "structure": "stacked", "hidden": (6,), **OPTIONS}),
    "dlrm": (DLRM, 3, {"bottom_hidden": (5,), "top_hidden": (6, 4), **OPTIONS}),
    "dlrm_without_numbers": (DLRM, 0, {"bottom_hidden": (), "top_hidden": (6,), **OPTIONS}),
}


def make(name):
    """The model with no parameter at a special value, and a batch of its arguments."""
    constructor, num_dense, arguments = MODELS[name]
    torch.manual_seed(0)
    model = constructor(num_dense, FIELDS, **arguments)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    lengths = torch.randint(0, 3, (len(FIELDS) * BATCH,))
    values = torch.randint(0, 20, (int(lengths.sum()),))
    return model, (torch.randn(BATCH, num_dense), SparseFeatures(tuple(FIELDS), values, lengths=lengths))


def step(model, arguments, *, forward=None):
    """Logits, and a backward pass that leaves dense gradients and updated rows."""
    logits = (forward or model)(*arguments)
    labels = torch.arange(BATCH) % 2
    torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float()).backward()
    return logits.detach()

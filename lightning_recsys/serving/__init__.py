"""From training to serving: versions of a model, published while it is trained, and opened to answer requests."""

try:
    from lightning_recsys.serving.export import export_model
    from lightning_recsys.serving.manifest import Manifest
    from lightning_recsys.serving.publishing.publisher import ModelPublisher
    from lightning_recsys.serving.publishing.retention import list_versions, release, roll_back
    from lightning_recsys.serving.reader import ModelReader, Prediction, PublishedModel
except ModuleNotFoundError as error:
    if error.name not in ("fsspec", "safetensors"):
        raise
    raise ModuleNotFoundError(
        "lightning_recsys.serving needs the extra [serving] of this package: pip install fsspec safetensors litserve"
        f" ({error})",
        name=error.name,
    ) from None

__all__ = [
    "Manifest",
    "ModelPublisher",
    "ModelReader",
    "Prediction",
    "PublishedModel",
    "export_model",
    "list_versions",
    "release",
    "roll_back",
]

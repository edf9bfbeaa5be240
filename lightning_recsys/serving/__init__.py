"""From training to serving: versions of a model, published while it is trained, and opened to answer requests."""

from typing import TYPE_CHECKING

from lightning_recsys.lazy_names import lazy_names

try:
    import fsspec  # noqa: F401
    import safetensors  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("fsspec", "safetensors"):
        raise
    raise ModuleNotFoundError(
        "lightning_recsys.serving needs the extra [serving] of this package: pip install fsspec safetensors litserve"
        f" ({error})",
        name=error.name,
    ) from None

if TYPE_CHECKING:
    from lightning_recsys.serving.export import export_model
    from lightning_recsys.serving.manifest import Manifest
    from lightning_recsys.serving.publishing.publisher import ModelPublisher
    from lightning_recsys.serving.publishing.retention import list_versions, release, roll_back
    from lightning_recsys.serving.reader import ModelReader, Prediction, PublishedModel

# Imported when first asked for. What publishes brings Lightning, which processes that answer requests do without.
_MODULES = {
    "Manifest": "manifest",
    "ModelPublisher": "publishing.publisher",
    "ModelReader": "reader",
    "Prediction": "reader",
    "PublishedModel": "reader",
    "export_model": "export",
    "list_versions": "publishing.retention",
    "release": "publishing.retention",
    "roll_back": "publishing.retention",
}


if not TYPE_CHECKING:  # which would make a type checker believe in every name
    __getattr__ = lazy_names(__name__, _MODULES)


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

"""A finished run's model, published or written for others: what ``recipes/export.py`` does."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig
from recipe_tools.build import Config, build_datamodule, build_task, plain
from recipe_tools.config_types import check_complete
from recipe_tools.quiet import be_quiet
from recipe_tools.record import FILE_NAME
from recipe_tools.trained import load_checkpoint

from lightning_recsys.checkpoints import check_file, is_folder, read_checkpoint
from lightning_recsys.embeddings import TableBackend
from lightning_recsys.runtime import configure_worker

try:
    from lightning_recsys.serving import ModelReader, export_model
    from lightning_recsys.serving.hub import load_pretrained, save_pretrained
    from lightning_recsys.serving.onnx import check_onnx, export_onnx
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from None


def run(cfg: DictConfig) -> None:
    """Export as ``cfg`` says, and say what was done."""
    be_quiet()
    check_complete(cfg)
    configure_worker()
    print(export(plain(cfg)))


def export(config: Config) -> str:
    """Publish the model as a base, or write it as a folder with a model card; returns what was done."""
    path = config["checkpoint"]
    if config["onnx"] is not None:
        check_onnx(config["onnx"])  # before anything is published
    check_file(path)
    checkpoint = load_checkpoint(path, "checkpoint")
    datamodule = build_datamodule(config, checkpoint=checkpoint)
    task = build_task(config, datamodule)
    if any(isinstance(module, TableBackend) and module.is_meta for module in task.modules()):
        raise ValueError(
            "checkpoint: its tables were made with embeddings.device=meta, and rows of such are in stores while a run"
            " trains: let the run publish, with 'callbacks=[default,model_publisher]'."
        )
    task.load_state_dict((read_checkpoint(path) if is_folder(path) else checkpoint)["state_dict"])
    version: int | None = None  # that is published: another one may be held, and count
    out, common = config["out"], {"num_dense": datamodule.num_dense, "datamodule": datamodule, "rows": config["rows"]}
    if config["layout"] == "huggingface":
        data = config["data"]["_target_"].rpartition(".")[2]
        save_pretrained(task.model, out, name=Path(out).name, metrics=_metrics_of(path), data=data, **common)
        done = f"wrote {out}, for load_pretrained"
    elif config["layout"] == "versions":
        position = {"epoch": checkpoint.get("epoch"), "global_step": checkpoint.get("global_step")}
        manifest = export_model(task.model, out, position=position, keep_runs=config["keep_runs"], **common)
        version = manifest.version
        done = f"published version {version} in {out}"
    else:
        raise ValueError(f"layout must be versions or huggingface, got {config['layout']!r}.")
    if config["onnx"] is not None:
        export_onnx(
            load_pretrained(out) if version is None else ModelReader(out, version=version).model, config["onnx"]
        )
        done += f"; its dense part is {config['onnx']}"
    return done


def _metrics_of(checkpoint: str) -> dict[str, float]:
    """The validation and test metrics of the checkpoint's run; none where it lies elsewhere by now."""
    record = Path(checkpoint).resolve().parent.parent / FILE_NAME
    if not record.is_file():
        return {}
    metrics = json.loads(record.read_text()).get("metrics") or {}
    return {name: value for name, value in metrics.items() if name.startswith(("val/", "test/"))}

"""Publish the model of a finished run: ``python recipes/export.py checkpoint=best.ckpt out=FOLDER [overrides]``.

The checkpoint carries the configuration of its run; overrides change it, such as ``data.root=/elsewhere``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from evaluate import load_checkpoint
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from recipe_tools.build import Config, build_datamodule, build_task, self_contained
from recipe_tools.overrides import explained_overrides, find_value
from recipe_tools.quiet import be_quiet

from lightning_recsys.checkpoints import is_folder, read_checkpoint
from lightning_recsys.embeddings import TableBackend
from lightning_recsys.runtime import configure_worker
from lightning_recsys.serving import export_model


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
def main(cfg: DictConfig) -> None:
    be_quiet()
    configure_worker()
    config: Config = self_contained(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    path = config["checkpoint"]
    checkpoint = load_checkpoint(path)
    datamodule = build_datamodule(config, checkpoint=checkpoint)
    task = build_task(config, datamodule)
    if any(isinstance(module, TableBackend) and module.is_meta for module in task.modules()):
        raise SystemExit(
            "checkpoint: its tables were made with embeddings.device=meta, and rows of such are in stores while a run"
            " trains: let the run publish, with 'callbacks=[default,model_publisher]'."
        )
    task.load_state_dict((read_checkpoint(path) if is_folder(path) else checkpoint)["state_dict"])
    position = {"epoch": checkpoint.get("epoch"), "global_step": checkpoint.get("global_step")}
    manifest = export_model(
        task.model, config["out"], num_dense=datamodule.num_dense, datamodule=datamodule, position=position
    )
    print(f"published version {manifest.version} in {config['out']}")


def offer_checkpoint_config(arguments: list[str]) -> None:
    """Give Hydra the configuration in the checkpoint, so that overrides are checked against what was trained."""
    path = find_value(arguments, "checkpoint")
    if path is None:
        if not any(argument.startswith("-") for argument in arguments):
            raise SystemExit("checkpoint: name it, as in python recipes/export.py checkpoint=best.ckpt out=published")
        ConfigStore.instance().store("trained", node={})  # --help and the like
        return
    if not Path(path).is_file() and not is_folder(path):
        raise SystemExit(f"checkpoint: there is no checkpoint {path}")
    trained = load_checkpoint(path).get("hyper_parameters", {}).get("config")
    if trained is None:
        raise SystemExit(f"checkpoint: {path} carries no configuration; was it written by recipes/train.py?")
    node = {key: value for key, value in trained.items() if key not in ("ckpt_path", "paths", "checkpoint", "out")}
    ConfigStore.instance().store("trained", node=OmegaConf.create(node))


if __name__ == "__main__":
    offer_checkpoint_config(sys.argv[1:])
    with explained_overrides("export"):
        main()

"""Options of commands that use the etcd of a job without a RunConfig: `culm dash`, `culm doctor`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from culm.cli.config_options import config_option

EtcdUser: TypeAlias = Annotated[str | None, config_option("etcd_user")]
EtcdCa: TypeAlias = Annotated[str | None, config_option("etcd_ca")]
EtcdCert: TypeAlias = Annotated[str | None, config_option("etcd_cert")]
EtcdKey: TypeAlias = Annotated[str | None, config_option("etcd_key")]
EtcdInsecure: TypeAlias = Annotated[bool, config_option("etcd_insecure")]
SecretFile: TypeAlias = Annotated[str | None, config_option("secret_file")]

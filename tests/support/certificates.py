"""Certificates of authorities that a test makes itself, with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1\n"
CA_SETTINGS = """
[ca]
default_ca = it
[it]
database = {0}.index
serial = {0}.next
new_certs_dir = .
default_md = sha256
policy = any
[any]
commonName = supplied
"""


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_authority(directory: Path, name: str) -> None:
    openssl(
        directory, "req", "-x509", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem",
        "-days", "2", "-subj", f"/CN={name}",
    )  # fmt: skip


def make_certificate(directory: Path, authority: str, name: str) -> None:
    _request(directory, name)
    openssl(
        directory, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem",
        "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2", "-out", f"{name}.pem",
        "-extfile", "names.ext",
    )  # fmt: skip


def make_expired_certificate(directory: Path, authority: str, name: str, subject: str) -> None:
    """One that was good for a day, long ago, for the name `subject`."""
    _request(directory, name, subject)
    (directory / "expired.cnf").write_text(CA_SETTINGS.format(name))
    (directory / f"{name}.index").write_text("")
    (directory / f"{name}.next").write_text("77\n")
    openssl(
        directory, "ca", "-batch", "-config", "expired.cnf", "-in", f"{name}.csr",
        "-cert", f"{authority}.pem", "-keyfile", f"{authority}.key", "-out", f"{name}.pem",
        "-startdate", "20200101000000Z", "-enddate", "20200102000000Z", "-notext",
        "-extfile", "names.ext",
    )  # fmt: skip


def _request(directory: Path, name: str, subject: str = "") -> None:
    openssl(
        directory, "req", *KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr",
        "-subj", f"/CN={subject or name}",
    )  # fmt: skip
    (directory / "names.ext").write_text(NAMES)

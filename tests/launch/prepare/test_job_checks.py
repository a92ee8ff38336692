"""What a job asks for that its machines cannot do."""

import pytest

from dstrain.choices import Attention
from dstrain.errors import InvalidConfig, Place
from dstrain.facts.cluster import gpus
from dstrain.facts.cluster.cluster import Origin, describe
from dstrain.job.file import JobFile
from dstrain.job.schema import Job
from dstrain.launch.prepare.job_checks import check_gpu


def test_flash_attention_is_refused_on_gpus_that_were_found_and_are_too_old() -> None:
    job = Job(model="m", output_dir="o", attn=Attention.FLASH_ATTENTION_2)
    file = JobFile(job=job, locate=lambda keys: Place(file="job.yaml", line=1, column=1))
    with pytest.raises(InvalidConfig, match=r"job\.yaml:1:1: flash_attention_2 does not run on v100-32g"):
        check_gpu(file, describe(gpu=gpus.gpu("v100-32g"), gpu_origin=Origin.MEASURED, gpus=1))
    check_gpu(file, describe(gpu=gpus.gpu("a100-80g"), gpu_origin=Origin.MEASURED, gpus=1))
    check_gpu(file, describe(gpu=gpus.from_nvml("new", 1000), gpu_origin=Origin.MEASURED, gpus=1))

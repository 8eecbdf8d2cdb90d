"""The mesh of groups of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import boostax
from boostax.parallel import data_mesh
from boostax.parallel.mesh import groups_of


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (None, {"device": 8}),
        (8, {"device": 8}),
        (4, {"host": 2, "device": 4}),
        (np.int64(2), {"host": 4, "device": 2}),
        (1, {"host": 8}),
    ],
)
def test_groups_of_the_devices(size, shape):
    mesh = data_mesh(size)
    assert dict(mesh.shape) == shape
    assert list(mesh.axis_names) == list(shape)
    assert mesh.axis_types == (AxisType.Auto,) * len(shape)
    # Group after group, in the order of JAX.
    assert mesh.devices.reshape(-1).tolist() == jax.devices()


def test_chosen_devices():
    devices = jax.devices()[:4]
    assert data_mesh(2, devices).devices.tolist() == [devices[:2], devices[2:]]
    assert dict(data_mesh(None, devices[:1]).shape) == {"device": 1}
    assert dict(data_mesh(1, devices[:1]).shape) == {"device": 1}
    assert data_mesh(devices=devices[::-1]).devices.tolist() == devices[::-1]


@pytest.mark.parametrize(
    ("size", "processes", "groups"),
    [
        (None, [0, 0, 1, 1], (2, 2)),
        (None, [0, 1, 2], (3, 1)),
        (1, [0, 0, 1, 1], (4, 1)),
        (4, [0, 0, 1, 1], (1, 4)),
        (2, [0, 0, 0, 1], (2, 2)),
    ],
)
def test_left_out_it_is_what_each_process_has(size, processes, groups):
    assert groups_of(size, processes) == groups


def test_processes_with_unequally_many_devices():
    with pytest.raises(ValueError, match=r"unequally many devices \(\[1, 3\] of 4\)"):
        groups_of(None, [0, 0, 0, 1])


@pytest.mark.parametrize("size", [3, 16, 0, -1])
def test_a_size_that_does_not_divide_names_both_numbers(size):
    with pytest.raises(ValueError, match=f"device_number = {size} does not divide the 8 devices"):
        data_mesh(size)


def test_wrong_arguments():
    for wrong in (True, 2.0, "4"):
        with pytest.raises(TypeError, match="device_number must be an int or None"):
            data_mesh(wrong)
    with pytest.raises(ValueError, match="devices is empty"):
        data_mesh(devices=[])
    with pytest.raises(ValueError, match="a device twice"):
        data_mesh(devices=jax.devices()[:1] * 2)


def test_the_package_knows_it():
    assert boostax.parallel.data_mesh is data_mesh
    assert "data_mesh" in dir(boostax.parallel)
    assert "parallel" in dir(boostax)
    with pytest.raises(AttributeError, match="no attribute 'mehs'"):
        boostax.parallel.mehs  # noqa: B018

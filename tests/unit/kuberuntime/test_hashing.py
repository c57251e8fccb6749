import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.kuberuntime.labels import container_hash, to_go_json
from pykubelet.util.text import fnv1a_32
from tests.support.containers import make_container


@pytest.mark.parametrize(("data", "value"), [(b"", 0x811C9DC5), (b"a", 0xE40C292C), (b"foobar", 0xBF9CF968)])
def test_fnv1a_32_known_inputs_return_published_values(data: bytes, value: int) -> None:
    assert fnv1a_32(data) == value


@pytest.mark.parametrize(("name", "value"), [("main", "390e0e43"), ("first", "63508f75")])
def test_container_hash_equals_upstream(name: str, value: str) -> None:
    assert container_hash(make_container(name)) == value


def test_container_hash_depends_on_name_and_image_only() -> None:
    plain = make_container()
    assert container_hash(plain) == container_hash(make_container(command=["sh"], tty=True))
    assert container_hash(plain) != container_hash(make_container("other"))
    assert container_hash(plain) != container_hash(make_container(image="other"))


@given(st.text(), st.text())
def test_container_hash_is_32_bit_hexadecimal(name: str, image: str) -> None:
    value = container_hash(make_container(name, image=image))
    assert int(value, 16) < 1 << 32
    assert value == f"{int(value, 16):x}"
    assert value == container_hash(make_container(name, image=image))


def test_container_hash_lone_surrogate_returns_hash() -> None:
    assert container_hash(make_container(image="\ud800"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None]}, '{"b":1,"a":[true,null]}'),
        ("<a href='x'>&", "\"\\u003ca href='x'\\u003e\\u0026\""),
        ("\u2028\u2029", '"\\u2028\\u2029"'),
        ("\x00\x1f\b\f\n\x7fé😀", '"\\u0000\\u001f\\b\\f\\n\x7fé😀"'),
    ],
)
def test_to_go_json_escapes_like_go(value: object, text: str) -> None:
    assert to_go_json(value) == text

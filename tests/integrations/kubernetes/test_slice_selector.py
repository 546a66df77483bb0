"""How an operator writes which EndpointSlices to follow."""

from __future__ import annotations

import pytest

from sgl_ext.integrations.kubernetes import SliceSelector
from sgl_ext.membership.member import MembershipError


@pytest.mark.parametrize(
    ("text", "namespace", "labels", "port", "api"),
    [
        ("engines", "", "kubernetes.io/service-name=engines", "", "v1"),
        ("serving/engines", "serving", "kubernetes.io/service-name=engines", "", "v1"),
        ("serving/engines:http", "serving", "kubernetes.io/service-name=engines", "http", "v1"),
        ("engines:8000?api=v1beta1", "", "kubernetes.io/service-name=engines", "8000", "v1beta1"),
        ("serving/?selector=app=e,tier=a", "serving", "app=e,tier=a", "", "v1"),
        ("serving/:http?selector=app=e", "serving", "app=e", "http", "v1"),
        ("?selector=app=e", "", "app=e", "", "v1"),
    ],
)
def test_a_service_or_labels_are_selected(
    text: str, namespace: str, labels: str, port: str, api: str
) -> None:
    expected = SliceSelector(namespace=namespace, labels=labels, port=port, api=api)
    assert SliceSelector.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a/b/c", r"must be kubernetes:\[NAMESPACE/\]SERVICE"),
        ("serving/", "must name a service, or selector=LABELS in its place"),
        ("engines?selector=app=e", "must name a service, or selector=LABELS in its place"),
        ("Serving/engines", "namespace 'Serving': is no name that Kubernetes allows"),
        ("serving/engines_1", "service 'engines_1': is no name that Kubernetes allows"),
        ("serving/engines:Http", "port 'Http': is no name that Kubernetes allows"),
        ("engines?api=v2", "api='v2': must be v1 or v1beta1"),
        ("engines?watch=1", "watch: is no option; selector and api are"),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(MembershipError, match=problem):
        SliceSelector.parse(text)

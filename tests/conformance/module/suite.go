// Package conformance pins the upstream node e2e suite, so that `go test -c` of
// k8s.io/kubernetes/test/e2e_node builds with the versions of this module.
// The ginkgo CLI and agnhost are pinned as tools in go.mod; standins holds the programs of images
// that this project does not download.
package conformance

import _ "k8s.io/kubernetes/test/e2e_node"

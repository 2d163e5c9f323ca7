// Package coexistence tests the engines beside other programs that write rules into the
// same network namespace: firewalls, container engines, CNI plugins, service meshes. Its
// rule sets are made by the programs themselves, in roots of Debian that hack/foreign.sh
// builds, or are files in testdata of the shape that a version of the program writes.
// docs/COEXISTENCE.md has its results:
//
//	go test ./internal/coexistence -update
package coexistence

// Package namespace goes into network namespaces.
package namespace

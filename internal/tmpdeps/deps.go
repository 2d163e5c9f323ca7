package tmpdeps

import (
	_ "github.com/google/nftables/expr"
	_ "github.com/google/nftables"
	_ "github.com/mdlayher/netlink"
	_ "github.com/vishvananda/netlink"
	_ "github.com/vishvananda/netns"
	_ "go.uber.org/goleak"
	_ "golang.org/x/sys/unix"
	_ "k8s.io/api/core/v1"
	_ "k8s.io/api/discovery/v1"
	_ "k8s.io/utils/net"
	_ "sigs.k8s.io/yaml"
	_ "github.com/google/go-cmp/cmp"
)

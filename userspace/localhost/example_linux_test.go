package localhost_test

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
	"github.com/serviceplane/serviceplane/userspace"
	"github.com/serviceplane/serviceplane/userspace/localhost"
)

// Node ports are accepted at the primary addresses, by rules, and at localhost, by sockets.
func ExampleWrap() {
	config, deps := proxier.Config{}, proxier.Deps{Logger: zap.NewNop()}

	config.NodePorts = proxier.NodePorts{Primary: true, Localhost: true}
	deps.Wrap = localhost.Wrap(userspace.Config{Config: config}, deps)
	p, err := nftables.New(nftables.Config{Config: config}, deps)

	fmt.Println(p != nil, err)
	// Output: true <nil>
}

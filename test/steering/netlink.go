package steering

import (
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect/route"
)

// ourProtocol marks our routes and rules.
const ourProtocol = route.Protocol

// everyTable and filterTable ask for the routes of all tables.
var everyTable = &netlink.Route{}

const filterTable = netlink.RT_FILTER_TABLE
